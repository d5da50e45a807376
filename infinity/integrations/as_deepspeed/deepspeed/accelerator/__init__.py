from infinity.integrations.dialect.accelerator import Accelerator as DeepSpeedAccelerator
from infinity.integrations.dialect.accelerator import get_accelerator

__all__ = ["DeepSpeedAccelerator", "get_accelerator"]
