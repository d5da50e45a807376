from infinity.integrations.dialect.refused import refused_class

__all__ = ["DeepSpeedZeRoOffload"]

DeepSpeedZeRoOffload = refused_class("DeepSpeedZeRoOffload")
