"""Save and load adapters of PEFT, whose values are in the tiers, in PEFT's file format."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.export import check_dtype, files_of_library
from infinity.checkpoint.inspection import trained_values
from infinity.checkpoint.tensors import RangeReader, read_header
from infinity.engine import Engine
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.deepspeed.values import full_fp32_values, safe_set_full_fp32_param

WEIGHTS = "adapter_model.safetensors"


def save_adapters(
    engine: Engine, directory: str | Path, *, adapter: str = "default", dtype: torch.dtype = torch.float32
) -> None:
    """Write an adapter as `PeftModel.save_pretrained` does. All ranks call this together; rank 0 writes.

    Args:
        directory: the directory for `PeftModel.from_pretrained` or `load_adapters`. As in PEFT, an adapter that is not
            called "default" is in a directory of its name below it.
        dtype: the dtype of the values; by default float32, the exact masters.

    Raises:
        ConfigError: the model is not one of PEFT, or has no such adapter; or `dtype` is no floating-point dtype.
        InfinityError: rank 0 could not write (raised on all ranks). An earlier adapter is unchanged.
    """
    check_dtype(dtype)
    model = _peft_model(engine, adapter)
    values = {}
    for name in _names(model, adapter).values():
        value = full_fp32_values(model.get_parameter(name))
        assert value is not None
        values[name] = value.to("cpu", dtype)
    ranks = engine.begin_gathering("save_adapters", stores=False).ranks
    ranks.on_rank_0(lambda: _write(model, Path(directory), adapter, values))


def export_adapters(
    source: Path, directory: Path, model: nn.Module, *, dtype: torch.dtype = torch.float32, tag: str | None = None
) -> None:
    """Write the adapter "default" of a checkpoint, as `save_adapters` does. The base model's weights are not read.

    Args:
        source: the checkpoint, or a directory of checkpoints.
        directory: the directory for `PeftModel.from_pretrained`.
        model: the model of PEFT, on any device. Its values are not used.
        dtype: the dtype of the values; by default float32, the exact masters.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or is not of `model`'s adapter.
        ConfigError: `tag` is no plain name.
    """
    stored, names = trained_values(source, tag), set(_names(model, "default").values())
    differing = sorted(names ^ stored.keys())
    if differing:
        raise CheckpointError(
            f"{source} is the checkpoint of another adapter or model ({len(differing)} differences): `{differing[0]}` "
            "is in one of them alone"
        )
    values = {name: value.to(dtype) for name, value in stored.items()}
    _write(model, directory, "default", values)


def _write(model: Any, directory: Path, adapter: str, values: Mapping[str, torch.Tensor]) -> None:
    with files_of_library(directory) as new:
        card = directory / "README.md"
        if card.is_file():
            shutil.copy(card, new)  # PEFT adds to it
        model.save_pretrained(
            str(new),
            state_dict=values,
            selected_adapters=[adapter],
            save_embedding_layers=False,  # trained ones are in `modules_to_save`, and so in `values`
        )


def load_adapters(engine: Engine, directory: str | Path, *, adapter: str = "default") -> None:
    """Load an adapter from the files of PEFT or `save_adapters`. All ranks call this together.

    The model must have had the adapter before `initialize`. Optimizer states stay as they are.

    Raises:
        ConfigError: the model is not one of PEFT, or has no such adapter.
        CheckpointError: the files are missing or of another adapter; the message names a parameter.
    """
    model = _peft_model(engine, adapter)
    directory = Path(directory)
    if adapter != "default" and (directory / adapter).is_dir():
        directory /= adapter
    stored = _read(directory)
    names = _names(model, adapter)
    _check(directory, stored, {key: model.get_parameter(name) for key, name in names.items()})
    for key, name in names.items():
        safe_set_full_fp32_param(model.get_parameter(name), stored[key])


def _peft_model(engine: Engine, adapter: str) -> Any:
    """Return the engine's model. Raise ConfigError unless it is one of PEFT and has the adapter."""
    model: Any = engine.module
    adapters = getattr(model, "peft_config", None)
    if adapters is None or not hasattr(model, "get_base_model"):
        raise ConfigError(
            f"the model is a {type(model).__name__} and has no adapters: wrap it with peft.get_peft_model before "
            "initialize"
        )
    if adapter not in adapters:
        raise ConfigError(f"the model has no adapter {adapter!r}; it has {', '.join(adapters)}")
    return model


def _names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Return the names of the adapter's parameters, by the keys under which PEFT stores them."""
    import peft  # noqa: PLC0415  # takes seconds; a caller with a PEFT model has imported it already

    names = [name for name, _ in model.named_parameters()]
    markers = {name: torch.tensor(index) for index, name in enumerate(names)}
    found = peft.get_peft_model_state_dict(model, markers, adapter, save_embedding_layers=False)
    return {key: names[int(marker)] for key, marker in found.items()}


def _read(directory: Path) -> Mapping[str, torch.Tensor]:
    """Read all tensors, without mapping the file: its truncation would kill the process by SIGBUS."""
    if not (directory / WEIGHTS).exists():
        raise CheckpointError(f"{directory} has no {WEIGHTS}: give the directory that an adapter was saved in")
    entries = read_header(directory / WEIGHTS)
    with closing(RangeReader(directory)) as files:
        return {
            key: files.read_elements(key, entry, 0, math.prod(entry.shape)).view(entry.shape)
            for key, entry in entries.items()
        }


def _check(directory: Path, stored: Mapping[str, torch.Tensor], params: Mapping[str, nn.Parameter]) -> None:
    for key, param in params.items():
        if key not in stored:
            raise CheckpointError(f"{directory} has no {key}: it is of another adapter, or of another model")
        if stored[key].shape != param.shape:
            here, there = tuple(param.shape), tuple(stored[key].shape)
            raise CheckpointError(f"{directory} has {key} in shape {there}; the model has {here}")
    more = sorted(stored.keys() - params.keys())
    if more:
        raise CheckpointError(f"{directory} has {more[0]}, which the model's adapter does not have ({len(more)} such)")
