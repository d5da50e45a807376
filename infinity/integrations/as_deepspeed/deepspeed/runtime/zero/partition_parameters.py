from collections.abc import Callable
from typing import Any

import torch

from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.parameters import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)
from infinity.integrations.deepspeed.refused import refused_class

__all__ = [
    "AllGatherCoalescedHandle",
    "GatheredParameters",
    "Init",
    "InsertPostInitMethodToModuleSubClasses",
    "MultipleAllGatherHandles",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "is_zero_param",
    "partitioned_param_data_shape",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

AllGatherCoalescedHandle = refused_class("AllGatherCoalescedHandle")
InsertPostInitMethodToModuleSubClasses = refused_class("InsertPostInitMethodToModuleSubClasses")
MultipleAllGatherHandles = refused_class("MultipleAllGatherHandles")
partitioned_param_data_shape = [0]  # of DeepSpeed's parameters that are away; here they keep their own

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The constructor itself: nothing is converted. transformers exchanges this function for a while."""
    return fn


def is_zero_param(parameter: Any) -> bool:
    """It has the attributes of a parameter under ZeRO-3."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
