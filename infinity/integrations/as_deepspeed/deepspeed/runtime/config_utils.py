from infinity.integrations.deepspeed.config_model import DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
