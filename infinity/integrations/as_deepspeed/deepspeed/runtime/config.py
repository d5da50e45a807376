from infinity.errors import ConfigError as DeepSpeedConfigError
from infinity.integrations.dialect.config import DeepSpeedConfig

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
