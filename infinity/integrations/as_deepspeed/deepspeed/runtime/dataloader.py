from infinity.integrations.dialect.data import RepeatingLoader
from infinity.integrations.dialect.refused import refused_class

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]

DeepSpeedDataLoader = refused_class("DeepSpeedDataLoader")
