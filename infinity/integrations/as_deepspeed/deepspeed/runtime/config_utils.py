from infinity.integrations.dialect.config_model import DeepSpeedConfigModel

__all__ = ["DeepSpeedConfigModel"]
