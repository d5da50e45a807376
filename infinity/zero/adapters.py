"""Models that an adapter library has wrapped: the original names of parameters, and the first values of LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError

_PEFT_PREFIX = "base_model.model."
# Parts that wrappers add to a name. Names of copies under `modules_to_save` also contain the adapter's name.
_WRAPPERS = {"base_layer", "original_module", "_orig_mod", "_checkpoint_wrapped_module"}
_COPIES = "modules_to_save"
_LORA_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def name_before_wrapping(name: str) -> str:
    """Return the name that a parameter had before the model was wrapped."""
    parts = [part for part in name.removeprefix(_PEFT_PREFIX).split(".") if part not in _WRAPPERS]
    if _COPIES in parts:
        place = parts.index(_COPIES)
        del parts[place : place + 2]
    return ".".join(parts)


def lora_rule(model: nn.Module, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that initialises a LoRA parameter of PEFT; None for any other parameter.

    If the base is on the meta device, PEFT puts the adapters on it, too. Only the configuration of PEFT then says how
    they are initialised.

    Raises:
        ConfigError: the configuration requires values that are computed from the base.
    """
    parts = name.split(".")
    place = next((index for index, word in enumerate(parts) if word in _LORA_PARTS), None)
    if place is None or place + 1 >= len(parts):
        return None
    if not hasattr(model.get_submodule(".".join(parts[:place])), "reset_lora_parameters"):
        return None
    configs: Any = getattr(model, "peft_config", {})
    rule = getattr(configs.get(parts[place + 1]), "init_lora_weights", True)
    if rule is not True and rule != "gaussian":
        raise ConfigError(
            f"LoRA parameter `{name}` is on the meta device and init_lora_weights is {rule!r}, which only a base "
            "with values can follow: choose True or 'gaussian', or build the base in memory or under infinity.zero.Init"
        )
    if parts[place] == "lora_embedding_B":
        return nn.init.normal_
    if parts[place] != "lora_A":
        return nn.init.zeros_
    return partial(nn.init.kaiming_uniform_, a=math.sqrt(5)) if rule is True else _gaussian


def _gaussian(values: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(values, std=1 / len(values))


def asks_for_names(caller: FrameType) -> bool:
    """Whether the caller of a `state_dict` is PEFT, which uses only the names of the entries under `modules_to_save`.

    When `Trainer` saves, rank 0 alone makes this call: the ranks have collected the values before.
    """
    return caller.f_globals.get("__name__") == "peft.utils.other" and caller.f_code.co_name.startswith("adapter_state")


def is_unmerged(model: nn.Module, name: str) -> bool:
    """Whether the parameter is a weight into which adapters can be merged, and none is merged now."""
    layer, found, _ = name.rpartition(".base_layer.")
    return bool(found) and getattr(model.get_submodule(layer), "merged", None) is False


def lora_values(model: nn.Module, name: str, shape: torch.Size) -> torch.Tensor | None:
    """Return the first values of a LoRA parameter of PEFT; None for any other parameter."""
    rule = lora_rule(model, name)
    return None if rule is None else rule(torch.empty(shape, dtype=torch.float32, device="cpu"))
