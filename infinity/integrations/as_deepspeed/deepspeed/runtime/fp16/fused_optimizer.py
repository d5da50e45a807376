from infinity.integrations.dialect.refused import refused_class

__all__ = ["FP16_Optimizer"]

FP16_Optimizer = refused_class("FP16_Optimizer")
