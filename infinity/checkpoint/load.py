"""Load: everything is checked before anything is changed."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.directory import check_tag, latest_tag, restore_interrupted
from infinity.checkpoint.format import (
    EXTRA,
    FROZEN_FIELD,
    MASTER,
    Manifest,
    read_manifest,
    stored_fields,
    stored_shape,
)
from infinity.checkpoint.tensors import TensorReader, check_files
from infinity.errors import CheckpointError
from infinity.kernels import Dither
from infinity.optim.formats import StateLayout, read_moments, write_master, write_moments
from infinity.zero.build import Runtime
from infinity.zero.partition import ParamSlot, Unit


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose files are whole and whose tensors fit the model.

    Attributes:
        extra: schedules, random states and the client's state, as `save_checkpoint` was given them.
    """

    path: Path
    manifest: Manifest
    extra: dict[str, Any]


def open_checkpoint(directory: Path, tag: str | None, runtime: Runtime) -> Loaded | None:
    """Read and check a checkpoint; nothing is changed.

    Args:
        tag: None for the one that was saved last.

    Returns:
        None if `tag` is None and the directory has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model.
    """
    restore_interrupted(directory)
    if tag is None:
        tag = latest_tag(directory)
        if tag is None:
            return None
    check_tag(tag)
    path = directory / tag
    manifest = read_manifest(path)
    _check_belongs(path, manifest, runtime)
    check_files(path, manifest.tensors)
    return Loaded(path, manifest, read_extra(path, manifest))


def load_tensors(loaded: Loaded, runtime: Runtime) -> None:
    """Read the parameters and moments of a checkpoint into the tiers; no update may be pending.

    Moments that were saved in another state format are converted on the way.
    """
    with TensorReader(loaded.path, loaded.manifest.tensors) as reader:
        for unit in runtime.partition.units:
            _load_unit(unit, reader, loaded.manifest.layout, runtime)


def read_extra(path: Path, manifest: Manifest) -> dict[str, Any]:
    """What came with the tensors.

    Raises:
        CheckpointError: the file is missing or damaged, or holds more than tensors and plain values.
    """
    try:
        content = (path / EXTRA).read_bytes()
        if zlib.crc32(content) != manifest.extra_crc:
            raise CheckpointError(f"{path / EXTRA} is damaged: its checksum differs from the manifest's")
        extra = torch.load(io.BytesIO(content), weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path / EXTRA} cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(f"{path / EXTRA} cannot be loaded: {error}") from error
    if not isinstance(extra, dict):
        raise CheckpointError(f"{path / EXTRA} is damaged: it holds a {type(extra).__name__}")
    return extra


def moments_of(
    reader: TensorReader, source: StateLayout, target: StateLayout, name: str, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """The moments of elements [start, stop) of parameter `name`, as format `target` keeps them, by field.

    Where the formats differ they are rounded as `target` does, with random bits that depend on the parameter and the
    position alone, so that any cutting into pieces gives the same numbers.
    """
    begin = start
    for field in source.moment_fields:
        begin = min(begin, start // field.block * field.block)  # scales belong to whole blocks
    states = {
        field.name: reader.read(f"{field.name}.{name}", begin // field.block, field.length(stop - begin))
        for field in source.moment_fields
    }
    if source.moment_fields == target.moment_fields and begin == start:
        return states
    moments = {key: values[start - begin :] for key, values in read_moments(source, states).items()}
    converted = {f.name: torch.empty(f.length(stop - start), dtype=f.dtype) for f in target.moment_fields}
    write_moments(target, moments, converted, Dither(zlib.crc32(name.encode()), start))
    return converted


def _check_belongs(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Every parameter of the model is there, in its shape, and none beside them."""
    layout = manifest.layout
    ours = (runtime.layout.first, runtime.layout.second)
    if manifest.moments != ours:
        raise CheckpointError(
            f"{path} has the moments {_names(manifest.moments)}, but this optimizer keeps {_names(ours)}: "
            "choose the optimizer that the checkpoint was saved with"
        )
    unknown = set(manifest.tensors)
    trainable = set()
    for unit in runtime.partition.units:
        for slot in unit.slots:
            if slot.trainable:
                trainable.add(slot.name)
            for key, (dtypes, shape) in _expected(slot, layout).items():
                entry = manifest.tensors.get(key)
                if entry is None:
                    raise CheckpointError(
                        f"{path} has no tensor {key}: it is of another model, or of other trainability"
                    )
                if entry.shape != shape:
                    raise CheckpointError(f"{path} has {key} in shape {entry.shape}; the model has {shape}")
                if entry.torch_dtype not in dtypes:
                    raise CheckpointError(f"{path} has {key} in {entry.dtype}: state format {layout.format} has not")
                unknown.discard(key)
    if unknown:
        raise CheckpointError(f"{path} has tensor {min(unknown)}, which the model has not: it is of another model")
    if not manifest.steps.keys() <= trainable:
        stranger = min(manifest.steps.keys() - trainable)
        raise CheckpointError(f"{path} counts the updates of {stranger}, which is no parameter that this run trains")


def _names(moments: tuple[str | None, str | None]) -> str:
    return " and ".join(name for name in moments if name is not None)


def _expected(slot: ParamSlot, layout: StateLayout) -> Mapping[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
    """Dtypes that are right, and shape, of every tensor that a checkpoint has of a parameter."""
    if not slot.trainable:
        return {f"{FROZEN_FIELD}.{slot.name}": ((torch.float32, torch.bfloat16, torch.float16), slot.shape)}
    return {
        f"{field.name}.{slot.name}": ((field.dtype,), stored_shape(field, slot.shape))
        for field in stored_fields(layout)
    }


def _load_unit(unit: Unit, reader: TensorReader, source: StateLayout, runtime: Runtime) -> None:
    layout = runtime.layout
    with runtime.executor.resident(unit.index) as flat:
        for tile, fields in runtime.pipeline.tiles(unit.index, writable=True):
            start, stop = tile.start, tile.start + tile.numel
            for slot in unit.slots:
                low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
                if not slot.trainable or low >= high:
                    continue
                first, last = low - slot.offset, high - slot.offset
                states = layout.narrow(fields, low - start, high - start)
                master = reader.read(f"{MASTER.name}.{slot.name}", first, last - first)
                write_master(layout, master, flat[low:high], states)
                for name, values in moments_of(reader, source, layout, slot.name, first, last).items():
                    states[name].copy_(values)
        for slot in unit.slots:
            if not slot.trainable:
                values = reader.read(f"{FROZEN_FIELD}.{slot.name}", 0, slot.numel)
                flat[slot.offset : slot.offset + slot.numel].copy_(values)
        runtime.executor.mark_changed(unit.index)
