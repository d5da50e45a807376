"""Save: one unit at a time, one tile at a time."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.directory import replacing
from infinity.checkpoint.format import (
    EXTRA,
    FROZEN_FIELD,
    TRAINED_FIELDS,
    Manifest,
    TensorEntry,
    TensorFile,
    write_file,
)
from infinity.errors import CheckpointError
from infinity.optim.formats import read_master, read_moments
from infinity.zero.build import Runtime
from infinity.zero.partition import Unit


def save_checkpoint(
    directory: Path,
    tag: str,
    runtime: Runtime,
    *,
    steps: Mapping[str, int],
    counters: Mapping[str, int],
    extra: Mapping[str, Any],
) -> Path:
    """Write a checkpoint; no update may be pending.

    Args:
        steps: updates that each parameter has had.
        extra: schedules, random states and the client's state: tensors and plain values only.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: writing failed; an earlier checkpoint of the same tag is still there.
        CheckpointError: `extra` has something that could not be loaded safely.
    """
    content = _serialise(extra)
    with replacing(directory, tag) as target:
        tensors: dict[str, TensorEntry] = {}
        for unit in runtime.partition.units:
            tensors.update(_save_unit(target / f"unit-{unit.index:05d}.safetensors", unit, runtime))
        write_file(target / EXTRA, content)
        Manifest(tensors, steps, counters, zlib.crc32(content)).write(target)
    return directory / tag


def _serialise(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(extra), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()


def _save_unit(path: Path, unit: Unit, runtime: Runtime) -> dict[str, TensorEntry]:
    dtype = runtime.layout.param_dtype
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for slot in unit.slots:
        if slot.trainable:
            shapes.update({f"{field}.{slot.name}": (torch.float32, slot.shape) for field in TRAINED_FIELDS})
        else:
            shapes[f"{FROZEN_FIELD}.{slot.name}"] = (dtype, slot.shape)
    file = TensorFile(path, shapes)
    try:
        with runtime.executor.resident(unit.index) as flat:
            for tile, fields in runtime.pipeline.tiles(unit.index, writable=False):
                start, stop = tile.start, tile.start + tile.numel
                values = {
                    "master": read_master(runtime.layout, flat[start:stop], fields),
                    **read_moments(runtime.layout, fields),
                }
                for slot in unit.slots:
                    low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
                    if slot.trainable and low < high:
                        for field, tensor in values.items():
                            file.write(f"{field}.{slot.name}", tensor[low - start : high - start])
            for slot in unit.slots:
                if not slot.trainable:
                    file.write(f"{FROZEN_FIELD}.{slot.name}", flat[slot.offset : slot.offset + slot.numel])
        return file.finish()
    except BaseException:
        file.abandon()
        raise
