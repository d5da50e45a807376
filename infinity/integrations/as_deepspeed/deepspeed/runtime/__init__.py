from . import lr_schedules, zero

__all__ = ["lr_schedules", "zero"]
