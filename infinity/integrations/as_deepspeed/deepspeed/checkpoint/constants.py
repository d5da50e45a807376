"""Keys of DeepSpeed's own checkpoint files, for scripts that name them; files here have none of these."""

__all__ = ["BASE_OPTIMIZER_STATE", "FP32_FLAT_GROUPS", "OPTIMIZER_STATE_DICT"]

BASE_OPTIMIZER_STATE = "base_optimizer_state"
FP32_FLAT_GROUPS = "fp32_flat_groups"
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
