"""Save: one unit at a time, one tile at a time."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import replacing
from infinity.checkpoint.format import EXTRA, FROZEN_FIELD, MASTER, Manifest, stored_fields, stored_shape
from infinity.checkpoint.tensors import TensorEntry, TensorFile, write_file
from infinity.errors import CheckpointError
from infinity.optim.formats import StateLayout, read_master
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
    mark_latest: bool = True,
) -> Path:
    """Write a checkpoint; no update may be pending.

    Args:
        steps: updates that each parameter has had.
        extra: schedules, random states and the client's state: tensors and plain values only.
        mark_latest: make it the one that is loaded by default.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: writing failed; an earlier checkpoint of the same tag is still there.
        CheckpointError: `extra` has something that could not be loaded safely.
    """
    content = _serialise(extra)
    with replacing(directory, tag, mark_latest=mark_latest) as target:
        tensors: dict[str, TensorEntry] = {}
        with Staging() as staging:
            for unit in runtime.partition.units:
                path = target / f"unit-{unit.index:05d}.safetensors"
                tensors.update(_save_unit(path, unit, runtime, staging))
        write_file(target / EXTRA, content)
        layout = runtime.layout
        moments = (layout.first, layout.second)
        Manifest(layout.format, moments, tensors, steps, counters, zlib.crc32(content)).write(target)
    return directory / tag


def _serialise(extra: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(extra), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()


def _save_unit(path: Path, unit: Unit, runtime: Runtime, staging: Staging) -> dict[str, TensorEntry]:
    file = TensorFile(path, _tensors_of(unit, runtime.layout), staging)
    try:
        with runtime.executor.resident(unit.index) as flat:
            for tile, fields in runtime.pipeline.tiles(unit.index, writable=False):
                start, stop = tile.start, tile.start + tile.numel
                for slot in unit.slots:
                    low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
                    if slot.trainable and low < high:
                        states = runtime.layout.narrow(fields, low - start, high - start)
                        file.write(f"{MASTER.name}.{slot.name}", read_master(runtime.layout, flat[low:high], states))
                        for field in runtime.layout.moment_fields:
                            file.write(f"{field.name}.{slot.name}", states[field.name])
            for slot in unit.slots:
                if not slot.trainable:
                    file.write(f"{FROZEN_FIELD}.{slot.name}", flat[slot.offset : slot.offset + slot.numel])
    except BaseException:
        file.abandon()
        raise
    return file.finish()


def _tensors_of(unit: Unit, layout: StateLayout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a unit, by key."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for slot in unit.slots:
        if slot.trainable:
            for field in stored_fields(layout):
                tensors[f"{field.name}.{slot.name}"] = (field.dtype, stored_shape(field, slot.shape))
        else:
            tensors[f"{FROZEN_FIELD}.{slot.name}"] = (layout.param_dtype, slot.shape)
    return tensors
