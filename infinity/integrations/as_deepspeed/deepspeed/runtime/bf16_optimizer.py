from infinity.integrations.dialect.refused import refused_class

__all__ = ["BF16_Optimizer"]

BF16_Optimizer = refused_class("BF16_Optimizer")
