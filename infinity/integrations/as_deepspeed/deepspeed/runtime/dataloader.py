from infinity.integrations.deepspeed.data import RepeatingLoader
from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

DeepSpeedDataLoader = refused_class("DeepSpeedDataLoader")
