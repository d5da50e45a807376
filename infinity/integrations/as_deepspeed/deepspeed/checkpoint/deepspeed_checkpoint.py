from infinity.integrations.deepspeed.refused import refused_class

__all__ = ["DeepSpeedCheckpoint"]

DeepSpeedCheckpoint = refused_class("DeepSpeedCheckpoint")
