"""Weights for inference: transformers' directory format, written one parameter at a time."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import storage_error
from infinity.checkpoint.extra import persistent_buffers
from infinity.checkpoint.files import write_file
from infinity.checkpoint.pretrained import INDEX, WEIGHTS
from infinity.checkpoint.tensors import TensorFile
from infinity.config import parse_size
from infinity.errors import CheckpointError, ConfigError, InfinityError, StorageError
from infinity.zero.build import Runtime

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_UNFINISHED = ".tmp-export"


def export_16bit(
    directory: Path,
    model: nn.Module,
    runtime: Runtime,
    parameters: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: int | str,
) -> None:
    """`Engine.save_16bit_model`: rank 0 writes, all ranks gather.

    Args:
        parameters: every parameter by name, which gathers as it goes.

    Raises:
        StorageError: writing failed; an earlier export is still there.
        ConfigError: `max_shard_size` is no size.
        InfinityError: the model is divided by tensor parallelism.
        CheckpointError: rank 0 could not write.
    """
    if runtime.parts.ranks.size > 1:
        raise InfinityError(
            "save_16bit_model writes whole parameters, and this model is divided by tensor parallelism: use "
            "save_checkpoint, which writes the parts"
        )
    try:
        shard_bytes = parse_size(max_shard_size)
    except ValueError as error:
        raise ConfigError(f"max_shard_size: {error}") from error
    compute = runtime.layout.param_dtype
    dtype = compute if compute.itemsize == 2 else torch.bfloat16
    buffers = persistent_buffers(model)
    specs = {slot.name: (dtype, slot.shape) for unit in runtime.partition.units for slot in unit.slots}
    specs |= {
        name: (dtype if buffer.is_floating_point() else buffer.dtype, tuple(buffer.shape))
        for name, buffer in buffers.items()
    }
    values = chain(parameters, buffers.items())
    done = runtime.ranks.rank != 0
    try:
        if not done:
            _export(directory, model, values, specs, dtype=dtype, shard_bytes=shard_bytes)
            done = True
    finally:
        for _ in values:  # all ranks gather together, to the end
            pass
        failed = runtime.ranks.any(not done)
    if failed:
        raise CheckpointError("rank 0 could not write the model; its own message says why")


def _export(
    directory: Path,
    model: nn.Module,
    values: Iterable[tuple[str, torch.Tensor]],
    specs: Specs,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
) -> None:
    """Write a model's weights and configuration.

    Files appear in `directory` when all of them are whole, and take the place of an earlier export there.

    Args:
        model: has a transformers configuration, or none, which is then not written.
        values: every tensor of `specs`, each once, in any order; converted to the dtype that `specs` has.
        specs: dtype and shape of every tensor, by name, in the order of the files.
        dtype: what the configuration says.
        shard_bytes: size at which a new file begins.

    Raises:
        StorageError: writing failed, for example because the disk is full.
    """
    unfinished = directory / _UNFINISHED
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _write_shards(unfinished, plan_shards(specs, shard_bytes), values)
        _write_config(unfinished, model, dtype)
        _publish(unfinished, directory)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, directory) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def plan_shards(specs: Specs, shard_bytes: int) -> dict[str, Specs]:
    """Which tensors go into which file, in order; a tensor larger than `shard_bytes` has a file of its own."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in specs.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _write_shards(directory: Path, shards: Mapping[str, Specs], values: Iterable[tuple[str, torch.Tensor]]) -> None:
    home = {name: file for file, specs in shards.items() for name in specs}
    open_files: dict[str, TensorFile] = {}
    with Staging() as staging:
        try:
            for file, specs in shards.items():
                open_files[file] = TensorFile(directory / file, specs, staging, {"format": "pt"})
            for name, value in values:
                dtype, _ = shards[home[name]][name]
                open_files[home[name]].write(name, value.detach().cpu().to(dtype).reshape(-1))
            while open_files:
                open_files.popitem()[1].finish()
        finally:
            for unfinished in open_files.values():
                unfinished.abandon()
    if len(shards) > 1:
        total = sum(torch.Size(s).numel() * d.itemsize for specs in shards.values() for d, s in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": home}
        write_file(directory / INDEX, json.dumps(index, indent=2, sort_keys=True).encode())


def _write_config(directory: Path, model: nn.Module, dtype: torch.dtype) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        config.save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(directory)


def _publish(unfinished: Path, directory: Path) -> None:
    """Put the files in their place, the index last; weights of an earlier export that they do not replace go first."""
    new = sorted(unfinished.iterdir(), key=lambda path: path.name == INDEX)
    names = {path.name for path in new}
    for pattern in (INDEX, WEIGHTS, "model-*-of-*.safetensors"):
        for old in directory.glob(pattern):
            if old.name not in names:
                old.unlink()
    for path in new:
        path.replace(directory / path.name)
