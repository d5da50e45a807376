from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["MoE"]

MoE = refused_class("MoE")
