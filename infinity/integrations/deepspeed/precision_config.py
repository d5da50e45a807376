"""The sections `fp16` and `bf16` as DeepSpeed's classes, for scripts that build or read one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import field_validator, model_validator
from torch import nn

from infinity.integrations.deepspeed.config_model import DeepSpeedConfigModel


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section `bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section `fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: int = 1
    fp16_master_weights_and_grads: bool = False

    @field_validator("loss_scale", "loss_scale_window", "min_loss_scale", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any) -> Any:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{value!r} must be a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{value!r} must be a finite number")
        return value

    @field_validator("loss_scale")
    @classmethod
    def _is_not_negative(cls, value: float) -> float:
        if value < 0:
            raise ValueError(f"{value} must be 0, for a scale that follows the gradients, or more")
        return value

    @model_validator(mode="after")
    def _can_follow_the_gradients(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0:
            for name in ("loss_scale_window", "min_loss_scale"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 where loss_scale is 0")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the initial value of a dynamic scale."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the settings of a dynamic scale, by DeepSpeed's names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section of a configuration under its new or its old name, or its defaults."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section of a configuration, or its defaults."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


# The dtype in which ranks exchange a parameter's gradients #

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"  # an attribute in DeepSpeed; here all gradients are exchanged in one dtype


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Whether a script has set a dtype for the parameter."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the dtype that a script has set, or the parameter's own."""
    found: torch.dtype = getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found
