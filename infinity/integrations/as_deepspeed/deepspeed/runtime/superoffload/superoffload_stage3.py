from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["SuperOffloadOptimizer_Stage3"]

SuperOffloadOptimizer_Stage3 = refused_class("SuperOffloadOptimizer_Stage3")
