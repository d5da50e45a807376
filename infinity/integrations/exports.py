"""Export a model for inference in transformers' format: in any dtype, and with its adapters merged."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.export import check_dtype, specs_of, write_model, write_on_rank_0
from infinity.checkpoint.extra import persistent_buffers
from infinity.config import named_size
from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError
from infinity.integrations.deepspeed.values import full_fp32_values
from infinity.zero.adapters import name_before_wrapping
from infinity.zero.model_parts import has_numbers


def save_pretrained(
    engine: Engine,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a directory for `AutoModel.from_pretrained`, holding one layer in memory. All ranks call this together.

    The weights are the exact float32 masters, rounded once to `dtype`. Adapters of PEFT are merged into their weights
    in float32. The model itself does not change.

    Args:
        dtype: the dtype of the files; by default, the dtype that the model computes in.
        max_shard_size: the size of a file, in bytes or such as "5GB"; a larger model is written to several files.

    Raises:
        ConfigError: an adapter is on a weight that is tied to another one, `max_shard_size` is no size, or `dtype` no
            floating-point dtype.
        InfinityError: the model is divided by tensor parallelism.
        StorageError: writing failed. An earlier export is unchanged.
        CheckpointError: rank 0 could not write.
    """
    if dtype is not None:
        check_dtype(dtype)
    model: Any = engine.module
    runtime = engine.begin_gathering("save_pretrained", stores=False)
    if runtime.parts.ranks.size > 1:
        raise InfinityError("save_pretrained writes whole parameters, and this model is divided by tensor parallelism")
    shard_bytes = named_size("max_shard_size", max_shard_size)
    base = model.get_base_model() if _has_adapters(model) else model
    dtype = runtime.layout.param_dtype if dtype is None else dtype
    sources = _sources(model)
    buffers = {name_before_wrapping(name): buffer for name, buffer in persistent_buffers(model).items()}
    specs = specs_of({name: param for name, (param, _) in sources.items()} | buffers, dtype)
    values = chain(_values(sources), buffers.items())

    def write() -> None:
        write_model(Path(directory), base, values, specs, dtype=dtype, shard_bytes=shard_bytes)

    write_on_rank_0(runtime.ranks, values, write)


Source = tuple[nn.Parameter, nn.Module | None]  # a parameter, and the layer whose adapters are merged into it


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _sources(model: nn.Module) -> dict[str, Source]:
    """Return the source of every parameter of the exported model, by its name in the model without adapters."""
    if not _has_adapters(model):
        return {name: (param, None) for name, param in model.named_parameters()}
    layers = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    active = {name: module for name, module in model.named_modules() if hasattr(module, "modules_to_save")}
    _check_untied(model)
    found: dict[str, Source] = {}
    for name, param in model.named_parameters():
        layer = next((layers[prefix] for prefix in _prefixes(name) if prefix in layers), None)
        copies = next((active[prefix] for prefix in _prefixes(name) if prefix in active), None)
        plain = name_before_wrapping(name)
        if layer is not None:
            if ".base_layer." not in name:
                continue  # a parameter of the adapter
            found[plain] = param, layer
        elif copies is None or _is_active(name, copies):
            found[plain] = param, None
    return found


def _check_untied(model: nn.Module) -> None:
    """Refuse a tied parameter with an adapter: transformers would tie the other one to the merged values, too."""
    named = list(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(param) for _, param in named)
    for name, param in named:
        if uses[id(param)] > 1 and (".base_layer." in name or ".original_module." in name):
            raise ConfigError(
                f"`{name_before_wrapping(name)}` is tied to another parameter and has an adapter, or a trained copy, "
                "which that one does not have: they cannot be merged. Save the adapter by itself (save_adapters), or "
                "untie them (tie_word_embeddings=False)"
            )


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "merge") and hasattr(module, "active_adapters")


def _is_active(name: str, copies: Any) -> bool:
    """Whether the parameter belongs to the active copy of a module in `modules_to_save`."""
    adapters: list[str] = list(copies.active_adapters)
    return any(f".modules_to_save.{adapter}." in name for adapter in adapters)


def _values(sources: dict[str, Source]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) in float32, codes in their own dtype. One layer at a time is in memory."""
    layer, merged = None, None
    for name, (param, of) in sources.items():
        if of is None:
            value = full_fp32_values(param) if has_numbers(param) else param.detach()
            assert value is not None
            yield name, value
            continue
        if of is not layer:
            layer, merged = of, _merged(of)
        assert merged is not None
        yield name, merged.get_parameter(name.rpartition(".")[2]).detach()


def _merged(layer: nn.Module) -> nn.Module:
    """Return the base layer of a float32 copy of `layer`, with its active adapters merged."""
    if not all(map(has_numbers, layer.parameters())):
        raise ConfigError(
            f"adapters of a quantised layer ({type(layer).__name__}) cannot be merged into it: save them by themselves "
            "(save_adapters)"
        )
    values = {name: full_fp32_values(param) for name, param in layer.named_parameters()}
    alone: Any = copy.deepcopy(layer)
    for name, param in alone.named_parameters():
        value = values[name]
        assert value is not None
        param.data = value.cpu()
    alone.merge()
    base: nn.Module = alone.get_base_layer()
    return base
