"""LoRA adapters for `infinity train --lora`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from infinity.checkpoint.tensors import read_header
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.zero.sizing import compute_dtype


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return the model with adapters on all linear layers except the output layer. Everything else is frozen.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(f"--lora {rank} needs the package peft: python -m pip install peft") from error
    settings: Any = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: nn.Module = get_peft_model(model, settings)
    return adapted


def reads_in_place(config: Config, directory: Path) -> bool:
    """Whether the frozen weights can be read from the model's files in every pass, without a copy on the drive."""
    if config.zero.stage != 3 or config.zero.offload_param.device != "nvme":
        return False
    files = directory.glob("*.safetensors")
    return {entry.torch_dtype for file in files for entry in read_header(file).values()} == {compute_dtype(config)}
