from infinity.integrations.dialect.refused import refused_class

__all__ = ["DeepSpeedCheckpoint"]

DeepSpeedCheckpoint = refused_class("DeepSpeedCheckpoint")
