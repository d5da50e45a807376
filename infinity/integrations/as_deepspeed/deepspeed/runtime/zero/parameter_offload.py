from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["DeepSpeedZeRoOffload"]

DeepSpeedZeRoOffload = refused_class("DeepSpeedZeRoOffload")
