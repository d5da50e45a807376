from infinity.integrations.deepspeed.named_optimizers import FusedAdam

from .multi_tensor_apply import MultiTensorApply

__all__ = ["FusedAdam", "MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)
