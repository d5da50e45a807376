from infinity.integrations.dialect.refused import refused_class

__all__ = ["FP16_UnfusedOptimizer"]

FP16_UnfusedOptimizer = refused_class("FP16_UnfusedOptimizer")
