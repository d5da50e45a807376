"""Load: everything is checked before anything is changed."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from infinity.checkpoint.directory import check_tag, latest_tag
from infinity.checkpoint.format import (
    EXTRA,
    FROZEN_FIELD,
    TRAINED_FIELDS,
    Manifest,
    TensorEntry,
    check_files,
    read_manifest,
    read_slice,
)
from infinity.errors import CheckpointError
from infinity.optim.formats import write_master, write_moments
from infinity.zero.build import Runtime
from infinity.zero.partition import ParamSlot, Unit


@dataclass(frozen=True)
class Loaded:
    """What came with the tensors; see `save_checkpoint`."""

    path: Path
    steps: dict[str, int]
    counters: dict[str, int]
    extra: dict[str, Any]


def load_checkpoint(directory: Path, tag: str | None, runtime: Runtime) -> Loaded | None:
    """Read a checkpoint into the tiers; no update may be pending.

    Args:
        tag: None for the one that was saved last.

    Returns:
        None if `tag` is None and the directory has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model. Nothing has been changed then.
    """
    if tag is None:
        tag = latest_tag(directory)
        if tag is None:
            return None
    check_tag(tag)
    path = directory / tag
    manifest = read_manifest(path)
    _check_belongs(path, manifest, runtime)
    check_files(path, manifest)
    try:
        extra = torch.load(path / EXTRA, weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(f"{path / EXTRA} cannot be loaded: {error}") from error
    for unit in runtime.partition.units:
        _load_unit(path, unit, manifest, runtime)
    return Loaded(path, dict(manifest.steps), dict(manifest.counters), extra)


def _keys(slot: ParamSlot) -> list[str]:
    fields = TRAINED_FIELDS if slot.trainable else (FROZEN_FIELD,)
    return [f"{field}.{slot.name}" for field in fields]


def _check_belongs(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Every parameter of the model is there, in its shape, and none beside them."""
    unknown = set(manifest.tensors)
    for unit in runtime.partition.units:
        for slot in unit.slots:
            for key in _keys(slot):
                entry = manifest.tensors.get(key)
                if entry is None:
                    raise CheckpointError(
                        f"{path} has no tensor {key}: it is of another model, or of other trainability"
                    )
                if entry.shape != slot.shape:
                    raise CheckpointError(f"{path} has {key} in shape {entry.shape}; the model has {slot.shape}")
                unknown.discard(key)
    if unknown:
        raise CheckpointError(f"{path} has tensor {min(unknown)}, which the model has not: it is of another model")


def _load_unit(path: Path, unit: Unit, manifest: Manifest, runtime: Runtime) -> None:
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}

        def read(key: str, start: int, numel: int) -> torch.Tensor:
            entry: TensorEntry = manifest.tensors[key]
            if entry.file not in files:
                files[entry.file] = stack.enter_context((path / entry.file).open("rb"))
            return read_slice(files[entry.file], entry, start, numel)

        flat = stack.enter_context(runtime.executor.resident(unit.index))
        for tile, fields in runtime.pipeline.tiles(unit.index, writable=True):
            start, stop = tile.start, tile.start + tile.numel
            master = torch.zeros(tile.numel, dtype=torch.float32)
            moments = {name: torch.zeros(tile.numel, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
            targets = {"master": master, **moments}
            for slot in unit.slots:
                low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
                if slot.trainable and low < high:
                    for field, target in targets.items():
                        values = read(f"{field}.{slot.name}", low - slot.offset, high - low)
                        target[low - start : high - start].copy_(values)
            write_master(runtime.layout, master, flat[start:stop], fields)
            write_moments(runtime.layout, moments, fields)
        for slot in unit.slots:
            if not slot.trainable:
                values = read(f"{FROZEN_FIELD}.{slot.name}", 0, slot.numel)
                flat[slot.offset : slot.offset + slot.numel].copy_(values)
        runtime.executor.mark_changed(unit.index)
