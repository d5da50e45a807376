from infinity.integrations.dialect.refused import refused_class

__all__ = ["MoE"]

MoE = refused_class("MoE")
