"""Load: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.conversion import moments_of
from infinity.checkpoint.directory import check_tag, latest_tag, restore_interrupted
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.format import (
    FROZEN_FIELD,
    MASTER,
    Manifest,
    frozen_params,
    read_manifest,
    trained_params,
)
from infinity.checkpoint.tensors import TensorReader, check_files
from infinity.errors import CheckpointError
from infinity.optim.formats import StateLayout, write_master
from infinity.zero.build import Runtime
from infinity.zero.partition import Unit

Shapes = Mapping[str, tuple[int, ...]]


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


def _check_belongs(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Every parameter of the model is there, in its shape, and none beside them."""
    ours = (runtime.layout.first, runtime.layout.second)
    if manifest.moments != ours:
        raise CheckpointError(
            f"{path} has the moments {_names(manifest.moments)}, but this optimizer keeps {_names(ours)}: "
            "choose the optimizer that the checkpoint was saved with"
        )
    slots = [slot for unit in runtime.partition.units for slot in unit.slots]
    trained = {slot.name: slot.shape for slot in slots if slot.trainable}
    frozen = {slot.name: slot.shape for slot in slots if not slot.trainable}
    _check_same(path, "trained", trained_params(manifest.tensors), trained)
    _check_same(path, "frozen", frozen_params(manifest.tensors), frozen)
    for name in manifest.steps.keys() - trained.keys():
        raise CheckpointError(f"{path} counts the updates of {name}, which is no parameter that is trained")


def _check_same(path: Path, kind: str, saved: Shapes, here: Shapes) -> None:
    for name, shape in here.items():
        if name not in saved:
            raise CheckpointError(f"{path} has no {kind} parameter {name}: it is of another model or trainability")
        if saved[name] != shape:
            raise CheckpointError(f"{path} has {name} in shape {saved[name]}; the model has {shape}")
    for name in saved.keys() - here.keys():
        raise CheckpointError(
            f"{path} has a {kind} parameter {name}, which the model has not: it is of another model or trainability"
        )


def _names(moments: tuple[str | None, str | None]) -> str:
    return " and ".join(name for name in moments if name is not None)


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
