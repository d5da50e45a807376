"""Load: everything is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from infinity.zero.partition import SlotPart, Unit


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose files are whole and whose tensors fit the model.

    Attributes:
        extra: schedules, random states and the client's state, as `save_checkpoint` was given them.
    """

    path: Path
    manifest: Manifest
    extra: dict[str, Any]


def open_checkpoint(directory: Path, tag: str | None, runtime: Runtime, *, moments: bool = True) -> Loaded | None:
    """Read and check a checkpoint; nothing is changed.

    Args:
        tag: None for the one that was saved last.
        moments: what `load_tensors` will be given.

    Returns:
        None if `tag` is None and the directory has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model.
    """
    found = runtime.ranks.on_rank_0(lambda: _check(directory, tag, runtime, moments=moments))
    if found is None:
        return None
    path = directory / found
    manifest = read_manifest(path)
    return Loaded(path, manifest, read_extra(path, manifest))


def _check(directory: Path, tag: str | None, runtime: Runtime, *, moments: bool) -> str | None:
    """Read all of a checkpoint; its tag, or None if there is none."""
    restore_interrupted(directory)
    if tag is None:
        tag = latest_tag(directory)
        if tag is None:
            return None
    check_tag(tag)
    path = directory / tag
    manifest = read_manifest(path)
    _check_weights(path, manifest, runtime)
    if moments:
        _check_moments(path, manifest, runtime)
    check_files(path, manifest.tensors)
    return tag


def load_tensors(loaded: Loaded, runtime: Runtime, *, moments: bool = True) -> None:
    """Read the parameters of a checkpoint into the tiers; no update may be pending.

    Args:
        moments: also the optimizer's moments, converted if they were saved in another state format; otherwise they
            become zero.
    """
    manifest = loaded.manifest
    with TensorReader(loaded.path, manifest.tensors) as reader:
        source = _Source(reader, set(trained_params(manifest.tensors)), manifest.layout if moments else None)
        for unit in runtime.partition.units:
            _load_unit(unit, source, runtime)


def _check_moments(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """The checkpoint, of this model, has moments of this optimizer for the parameters that are trained here."""
    ours = (runtime.layout.first, runtime.layout.second)
    if manifest.moments != ours:
        raise CheckpointError(
            f"{path} has the moments {_names(manifest.moments)}, but this optimizer keeps {_names(ours)}: "
            "choose the optimizer that the checkpoint was saved with"
        )
    slots = [slot for unit in runtime.partition.units for slot in unit.slots]
    trained = {slot.name for slot in slots if slot.trainable}
    saved = trained_params(manifest.tensors).keys()
    for name in sorted(trained ^ saved):
        here, there = ("is trained", "was frozen") if name in trained else ("is frozen", "was trained")
        raise CheckpointError(
            f"{name} {here}, but in {path} it {there}: load with load_module_only=True to take the weights alone"
        )
    for name in manifest.steps.keys() - trained:
        raise CheckpointError(f"{path} counts the updates of {name}, which is no parameter that is trained")


def _check_weights(path: Path, manifest: Manifest, runtime: Runtime) -> None:
    """Every parameter of the model is there, in its shape, and none beside them."""
    saved = trained_params(manifest.tensors) | frozen_params(manifest.tensors)
    here = {slot.name: slot.shape for unit in runtime.partition.units for slot in unit.slots}
    for name, shape in here.items():
        if name not in saved:
            raise CheckpointError(f"{path} has no parameter {name}: it is of another model")
        if saved[name] != shape:
            raise CheckpointError(f"{path} has {name} in shape {saved[name]}; the model has {shape}")
    for name in saved.keys() - here.keys():
        raise CheckpointError(f"{path} has a parameter {name}, which the model has not: it is of another model")


def _names(moments: tuple[str | None, str | None]) -> str:
    return " and ".join(name for name in moments if name is not None)


@dataclass(frozen=True)
class _Source:
    """Where values come from.

    Attributes:
        trained: parameters that were trained when the checkpoint was saved.
        moments: format of the moments; None for zeros.
    """

    reader: TensorReader
    trained: Set[str]
    moments: StateLayout | None

    def weights(self, part: SlotPart) -> torch.Tensor:
        """A part of a parameter: of its master, or of its values if it was frozen."""
        field = MASTER.name if part.slot.name in self.trained else FROZEN_FIELD
        return self.reader.read(f"{field}.{part.slot.name}", part.offset, part.stop - part.start)


def _load_unit(unit: Unit, source: _Source, runtime: Runtime) -> None:
    layout, partition = runtime.layout, runtime.partition
    with runtime.executor.resident(unit.index) as flat:
        for tile, fields in runtime.pipeline.tiles(unit.index, writable=True):
            for part in partition.parts(unit, tile.start, tile.start + tile.numel):
                states = layout.narrow(fields, part.start - tile.start, part.stop - tile.start)
                _load_part(part, source, layout, flat[part.shard], states)
        for part in partition.parts(unit):
            if not part.slot.trainable:
                flat[part.shard].copy_(source.weights(part))
        runtime.executor.mark_changed(unit.index)


def _load_part(
    part: SlotPart,
    source: _Source,
    layout: StateLayout,
    param: torch.Tensor,
    states: Mapping[str, torch.Tensor],
) -> None:
    """A part of one trained parameter."""
    write_master(layout, source.weights(part).float(), param, states)
    if source.moments is None:
        for field in layout.moment_fields:
            states[field.name].zero_()
        return
    start, stop = part.param.start, part.param.stop
    for name, values in moments_of(source.reader, source.moments, layout, part.slot.name, start, stop).items():
        states[name].copy_(values)
