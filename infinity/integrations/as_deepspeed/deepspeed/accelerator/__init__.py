from infinity.integrations.deepspeed.accelerator import Accelerator as DeepSpeedAccelerator
from infinity.integrations.deepspeed.accelerator import get_accelerator, is_current_accelerator_supported

__all__ = ["DeepSpeedAccelerator", "get_accelerator", "is_current_accelerator_supported"]
