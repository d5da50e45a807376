from infinity.integrations.dialect.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
