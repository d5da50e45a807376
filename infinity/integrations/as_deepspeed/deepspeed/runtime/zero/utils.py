from infinity.errors import ConfigError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException"]
