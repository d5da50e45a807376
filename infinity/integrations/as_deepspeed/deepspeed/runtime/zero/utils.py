from infinity.errors import ConfigError as ZeRORuntimeException

from .partition_parameters import is_zero_param

__all__ = ["ZeRORuntimeException", "is_zero_param"]
