"""Weights for inference: transformers' directory format, written one parameter at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import exclusive, make_directory, writing
from infinity.checkpoint.extra import persistent_buffers, tied_names
from infinity.checkpoint.files import discard, is_file_name, write_file
from infinity.checkpoint.pretrained import INDEX, WEIGHTS
from infinity.checkpoint.publish import new_stem, publish
from infinity.checkpoint.tensors import TensorFile, read_header
from infinity.config import named_size
from infinity.errors import CheckpointError, ConfigError, InfinityError
from infinity.io.directory import sync_directory
from infinity.zero.build import Runtime
from infinity.zero.model_parts import has_numbers
from infinity.zero.outside_units import codes
from infinity.zero.ranks import Ranks

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_UNFINISHED = ".tmp-export"


def export_16bit(
    directory: Path,
    model: nn.Module,
    runtime: Runtime,
    parameters: Iterable[tuple[str, torch.Tensor]],
    max_shard_size: int | str,
    *,
    file_name: str | None = None,
    frozen: bool = True,
) -> None:
    """Implement `Engine.save_16bit_model`: all ranks gather the parameters, rank 0 writes them.

    Args:
        parameters: every parameter by name. Each step of the iterator gathers one, on all ranks.
        file_name: the name of a single file to write; None for a directory in transformers' format.
        frozen: write frozen parameters, too.

    Raises:
        StorageError: writing failed. An earlier export is unchanged.
        ConfigError: `max_shard_size` is no size, or `file_name` is no file name.
        InfinityError: the model is divided by tensor parallelism.
        CheckpointError: rank 0 could not write.
    """
    if runtime.parts.ranks.size > 1:
        raise InfinityError(
            "save_16bit_model writes whole parameters, and this model is divided by tensor parallelism: use "
            "save_checkpoint, which writes the parts"
        )
    if file_name is not None and (not is_file_name(file_name) or Path(file_name).suffix == ".json"):
        raise ConfigError(f"save_filename {file_name!r} must be the plain name of a file with weights")
    shard_bytes = named_size("max_shard_size", max_shard_size) if file_name is None else None
    compute = runtime.layout.param_dtype
    dtype = compute if compute.itemsize == 2 else torch.bfloat16
    buffers = persistent_buffers(model)
    infos = [info for unit in runtime.partition.units for info in unit.params]
    specs = {info.name: (dtype, info.shape) for info in infos if frozen or info.trainable}
    specs |= specs_of(codes(model), dtype) if frozen else {}
    specs |= specs_of(buffers, dtype)
    values = chain(parameters, buffers.items())

    def write() -> None:
        wanted = ((name, value) for name, value in values if name in specs)
        if file_name is None or file_name == WEIGHTS:
            write_model(directory, model, wanted, specs, dtype=dtype, shard_bytes=shard_bytes)
        else:
            _write_single(directory, file_name, wanted, specs, tied_names(model))

    write_on_rank_0(runtime.ranks, values, write)


def write_on_rank_0(ranks: Ranks, values: Iterator[object], write: Callable[[], None]) -> None:
    """Call `write` on rank 0, and iterate over `values` to the end on all ranks.

    Args:
        values: each step is a gather of all ranks. `write` iterates over it, and may stop early by an error.

    Raises:
        CheckpointError: on the other ranks, if `write` raised an error on rank 0.
    """
    done = ranks.rank != 0
    try:
        if not done:
            write()
            done = True
    finally:
        for _ in values:  # all ranks must take part in every gather
            pass
        failed = ranks.any(not done)
    if failed:
        raise CheckpointError("rank 0 could not write the model; its own message says why")


def write_model(
    directory: Path,
    model: nn.Module,
    values: Iterable[tuple[str, torch.Tensor]],
    specs: Specs,
    *,
    dtype: torch.dtype,
    shard_bytes: int | None,
) -> None:
    """Write a model's weights and configuration.

    They replace an earlier export in `directory` when all files are complete; see `publish.py`.

    Args:
        model: its transformers configuration is written, if it has one.
        values: every tensor of `specs` once, in any order. Each is converted to its dtype in `specs`.
        specs: dtype and shape of every tensor, by name, in the order of the files.
        dtype: the dtype that the configuration names.
        shard_bytes: size at which a new file begins; None for one file.

    Raises:
        StorageError: writing failed, for example because the disk is full.
    """
    with _unfinished(directory) as unfinished:
        _write_shards(unfinished, plan_shards(specs, shard_bytes, new_stem(directory)), values)
        _write_config(unfinished, model, dtype)
        publish(unfinished, directory)


def _write_single(
    directory: Path, name: str, values: Iterable[tuple[str, torch.Tensor]], specs: Specs, tied: Mapping[str, str]
) -> None:
    """Write the tensors into one file. A state dict of torch also has the names in `tied`, a safetensors file not."""
    with _unfinished(directory) as unfinished:
        _write_shards(unfinished, {name: specs}, values)
        if Path(name).suffix != ".safetensors":
            _pickle(unfinished / name, tied)
        (unfinished / name).replace(directory / name)
        sync_directory(directory)


def _pickle(path: Path, tied: Mapping[str, str]) -> None:
    """Convert a safetensors file to the format of `torch.save`. Its tensors are memory-mapped, not read at once."""
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in read_header(path).items():
        tensors[key] = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        if entry.nbytes:
            stored = np.memmap(path, np.uint8, "c", entry.start, (entry.nbytes,))
            tensors[key] = torch.from_numpy(stored).view(entry.torch_dtype).view(entry.shape)
    tensors |= {name: tensors[first] for name, first in tied.items() if first in tensors}
    pickled = path.with_name(f"{path.name}.new")
    with pickled.open("xb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    pickled.replace(path)


@contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory within `directory`, which is locked against other exports in this context."""
    unfinished = directory / _UNFINISHED
    with writing(directory, "the model"), exclusive(directory):
        discard(unfinished)
        unfinished.mkdir()
        try:
            yield unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def files_of_library(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory for the files of a library; then move each file to its place in `directory`.

    Raises:
        StorageError: a file cannot be written. The files in `directory` are unchanged.
        CheckpointError: the library has raised an error, which the message quotes. The files are unchanged.
    """
    with _unfinished(directory) as unfinished:
        try:
            yield unfinished
        except (InfinityError, OSError):
            raise
        except Exception as error:  # safetensors and tokenizers have classes of their own for a full disk
            raise CheckpointError(f"{directory} cannot be written: {type(error).__name__}: {error}") from error
        places = set()
        for file in sorted(path for path in unfinished.rglob("*") if path.is_file()):
            place = directory / file.relative_to(unfinished)
            make_directory(place.parent)
            file.replace(place)
            places.add(place.parent)
        for parent in places:
            sync_directory(parent)


def specs_of(values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Specs:
    """Return the stored dtype and shape of these tensors. All but codes are stored in `dtype`."""
    return {name: (dtype if has_numbers(value) else value.dtype, tuple(value.shape)) for name, value in values.items()}


def check_dtype(dtype: Any) -> None:
    """Raise ConfigError unless this is a floating-point dtype of torch."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {dtype!r}; give a floating-point dtype of torch, such as torch.float32")


def plan_shards(specs: Specs, shard_bytes: int | None, stem: str = "model") -> dict[str, Specs]:
    """Return the tensors of each file, in order. A tensor larger than `shard_bytes` gets a file of its own."""
    shards: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, (dtype, shape) in specs.items():
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if shard_bytes is not None and shards[-1] and filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += nbytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _write_shards(directory: Path, shards: Mapping[str, Specs], values: Iterable[tuple[str, torch.Tensor]]) -> None:
    home = {name: file for file, specs in shards.items() for name in specs}
    with Staging() as staging, ExitStack() as opened:
        files = {
            file: opened.enter_context(closing(TensorFile(directory / file, specs, staging, {"format": "pt"})))
            for file, specs in shards.items()
        }
        for name, value in values:
            dtype, _ = shards[home[name]][name]
            files[home[name]].write(name, value.detach().cpu().to(dtype).reshape(-1))
        for file in files.values():
            file.finish()
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
        try:
            config.save_pretrained(directory)
        except ValueError:  # generation parameters of old configurations: models load them, but cannot save them
            config.to_json_file(directory / "config.json")
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_file"):
        generation.to_json_file(directory / "generation_config.json")  # save_pretrained refuses what some models ship
