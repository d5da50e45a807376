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
    """The model with adapters of this rank on all linear layers but the output's; everything else is frozen.

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
        # PEFT asks for an attribute whose name transformers has changed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: nn.Module = get_peft_model(model, settings)
    return adapted


def reads_in_place(config: Config, directory: Path) -> bool:
    """The frozen weights can be read where they lie in every pass: no copy is stored on the drive."""
    if config.zero.stage != 3 or config.zero.offload_param.device != "nvme":
        return False
    files = directory.glob("*.safetensors")
    return {entry.torch_dtype for file in files for entry in read_header(file).values()} == {compute_dtype(config)}
