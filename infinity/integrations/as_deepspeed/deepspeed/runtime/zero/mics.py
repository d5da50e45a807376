from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["MiCS_Init", "MiCS_Optimizer"]

MiCS_Init = refused_class("MiCS_Init")
MiCS_Optimizer = refused_class("MiCS_Optimizer")
