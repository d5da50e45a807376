import torch
from torch import nn

__all__ = ["PARAM_COMM_DTYPE_ATTR_NAME", "get_comm_dtype", "has_comm_dtype"]

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"  # of DeepSpeed's parameters; here gradients of all travel in one dtype


def has_comm_dtype(param: nn.Parameter) -> bool:
    """A script has set one."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """That, or the parameter's own."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found
