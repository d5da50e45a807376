"""Load: everything is checked before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from infinity.checkpoint.conversion import moments_of
from infinity.checkpoint.directory import check_tag, latest_tag, restore_interrupted
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.format import (
    FROZEN_FIELD,
    MASTER,
    Manifest,
    frozen_params,
    parse_manifest,
    read_manifest_bytes,
    trained_params,
)
from infinity.checkpoint.identity import first_difference
from infinity.checkpoint.runs import Run
from infinity.checkpoint.tensors import RunningSums, TensorReader, check_files
from infinity.errors import CheckpointError
from infinity.optim.formats import StateLayout, write_master
from infinity.zero.build import Runtime
from infinity.zero.partition import Partition, SlotPart, Unit
from infinity.zero.ranks import Ranks

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_PIECE = 1 << 22  # elements that are verified at once


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose files are whole and whose tensors fit the model.

    Attributes:
        sums: what the tensors held when they were checked.
        extra: schedules, random states and the client's state, as `save_checkpoint` was given them.
    """

    path: Path
    manifest: Manifest
    sums: RunningSums
    extra: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """What rank 0 has checked."""

    tag: str
    manifest: bytes
    sums: RunningSums


def open_checkpoint(
    directory: Path,
    tag: str | None,
    runtime: Runtime,
    run: Run,
    *,
    moments: bool = True,
    strict_model: bool = True,
    check: Callable[[Path, dict[str, Any]], None] = lambda path, extra: None,
) -> Loaded | None:
    """Read and check a checkpoint; nothing is changed. All ranks call this together; if one refuses, all do.

    Rank 0 verifies every byte. The others see that theirs is the same checkpoint, and verify what they will read: they
    may be on other machines, whose directory of this name is another one.

    Args:
        tag: None for the one that was saved last.
        run: of the model that is to be loaded into.
        moments: what `load_tensors` will be given.
        strict_model: refuse what another model of the same parameters saved.
        check: looks at what came with the tensors, and raises a CheckpointError if it does not fit.

    Returns:
        None if `tag` is None and the directory has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another model, or is not the same for all ranks.
    """
    found = runtime.ranks.on_rank_0(
        lambda: _check(directory, tag, runtime, run, moments=moments, strict_model=strict_model)
    )
    if found is None:
        return None

    def verify() -> Loaded:
        path = directory / found.tag
        manifest = parse_manifest(path, found.manifest)
        if read_manifest_bytes(path) != found.manifest:
            raise CheckpointError(
                f"{path} is another checkpoint here than on rank 0: give all ranks one directory that they share, or "
                "copies of one checkpoint"
            )
        loaded = Loaded(path, manifest, found.sums, read_extra(path, manifest))
        if runtime.ranks.rank != 0:
            _check_own(loaded, runtime, moments=moments)
        check(path, loaded.extra)
        return loaded

    return _together(runtime.ranks, verify)


def _check(
    directory: Path, tag: str | None, runtime: Runtime, run: Run, *, moments: bool, strict_model: bool
) -> Found | None:
    """Read all of a checkpoint; None if there is none."""
    restore_interrupted(directory)
    if tag is None:
        tag = latest_tag(directory)
        if tag is None:
            return None
    check_tag(tag)
    path = directory / tag
    stored = read_manifest_bytes(path)
    manifest = parse_manifest(path, stored)
    _check_weights(path, manifest, runtime)
    _check_model(path, manifest, run, strict=strict_model)
    if moments:
        _check_moments(path, manifest, runtime)
    return Found(tag, stored, check_files(path, manifest.tensors))


def _check_own(loaded: Loaded, runtime: Runtime, *, moments: bool) -> None:
    """What this rank will read is what rank 0 has checked."""
    with TensorReader(loaded.path, loaded.manifest.tensors, loaded.sums) as reader:
        source = _Source.of(reader, loaded.manifest, moments=moments)
        for unit in runtime.partition.units:
            for part in _pieces(runtime.partition, unit):
                source.weights(part)
                if part.slot.trainable and source.moments is not None:
                    moments_of(
                        reader, source.moments, source.moments, part.slot.name, part.param.start, part.param.stop
                    )


def _pieces(partition: Partition, unit: Unit) -> Iterator[SlotPart]:
    """What this rank reads of a unit, in parts that do not take much memory."""
    for part in partition.parts(unit):
        for start in range(part.start, part.stop, _PIECE):
            stop = min(start + _PIECE, part.stop)
            yield replace(part, start=start, stop=stop, offset=part.offset + start - part.start)


def _together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Run `action` on every rank; if it fails on one, all of them raise a CheckpointError that names it."""
    failure: Exception | None = None
    result: list[Result] = []
    try:
        result.append(action())
    except Exception as error:  # the other ranks wait for word of it, too
        failure = error
    messages = ranks.of_all(None if failure is None else str(failure))
    if failure is not None and (ranks.size == 1 or not isinstance(failure, CheckpointError)):
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise CheckpointError(f"rank {rank}: {message}") from failure
    return result[0]


def load_tensors(loaded: Loaded, runtime: Runtime, *, moments: bool = True) -> None:
    """Read the parameters of a checkpoint into the tiers; no update may be pending. All ranks call this together.

    Args:
        moments: also the optimizer's moments, converted if they were saved in another state format; otherwise they
            become zero.

    Raises:
        CheckpointError: the files have changed since they were checked, or cannot be read any more. Some parameters
            have changed then, and others not.
    """

    def load() -> None:
        with TensorReader(loaded.path, loaded.manifest.tensors, loaded.sums) as reader:
            source = _Source.of(reader, loaded.manifest, moments=moments)
            for unit in runtime.partition.units:
                _load_unit(unit, source, runtime)

    try:
        _together(runtime.ranks, load)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Some parameters had been loaded by then, so this engine trains and saves no more: close it, and "
            "load into a new one"
        ) from error


def _check_model(path: Path, manifest: Manifest, run: Run, *, strict: bool) -> None:
    """The model that was saved computes what this one does, as far as that can be seen."""
    difference = None if manifest.model is None else first_difference(manifest.model, run.model)
    if difference is None:
        return
    if strict:
        raise CheckpointError(
            f"{path} is of another model: {difference}. Build the model that was saved, or pass strict_model=False to "
            "take its values all the same"
        )
    _log.warning("%s is of another model, and is loaded all the same: %s", path, difference)


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

    @staticmethod
    def of(reader: TensorReader, manifest: Manifest, *, moments: bool) -> _Source:
        return _Source(reader, set(trained_params(manifest.tensors)), manifest.layout if moments else None)

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
