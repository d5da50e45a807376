from . import config, monitor

__all__ = ["config", "monitor"]
