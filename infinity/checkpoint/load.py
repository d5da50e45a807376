"""Load checkpoints. Each rank checks everything that it will read before any rank changes a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.codes import Codes, load_codes
from infinity.checkpoint.conversion import moment_slices, moments_of
from infinity.checkpoint.directory import resolve_replaced
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.find import Found, find_checkpoint
from infinity.checkpoint.fit import check_fit
from infinity.checkpoint.format import (
    CODE_FIELD,
    FROZEN_FIELD,
    MASTER_FIELD,
    Manifest,
    parse_manifest,
    read_manifest_bytes,
)
from infinity.checkpoint.runs import Run
from infinity.checkpoint.stored import CHECK_THREADS, StoredReader, StoredTensor, check_files, check_slices
from infinity.errors import CheckpointError
from infinity.optim.formats import write_master
from infinity.tiers.state_layout import StateLayout
from infinity.zero.build import Runtime
from infinity.zero.partition import ParamPart, UnitLayout


@dataclass(frozen=True)
class Loaded:
    """A checked checkpoint: its tensors fit the model, and everything that this rank reads is undamaged.

    Attributes:
        tensors: the stored tensors by key, with the checksums that verify them.
        extra: the content of `extra.pt`: schedules, random states, the client's state.
    """

    path: Path
    manifest: Manifest
    tensors: Mapping[str, StoredTensor]
    extra: dict[str, Any]


def open_checkpoint(
    directory: Path,
    tag: str | None,
    runtime: Runtime,
    run: Run,
    *,
    codes: Codes,
    moments: bool = True,
    strict_model: bool = True,
    all_weights: bool = True,
    check: Callable[[Path, dict[str, Any]], None] = lambda path, extra: None,
) -> Loaded | None:
    """Find and check a checkpoint, without changing the engine. All ranks call this together; if one fails, all do.

    Rank 0's manifest counts. Every rank checks that it has the same manifest, and verifies what it will read: ranks on
    several machines may have different directories under one path.

    Args:
        tag: None for the last saved checkpoint or, if it is damaged, the newest undamaged one.
        run: the run of the model that the checkpoint is loaded into.
        codes, moments: the arguments that `load_tensors` will get.
        strict_model: refuse a checkpoint of another model with the same parameters.
        all_weights: refuse a checkpoint that lacks some frozen parameters or codes. Otherwise these keep their values.
        check: raises CheckpointError if the content of `extra.pt` does not fit.

    Returns:
        None if `tag` is None and the directory has no checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another model, or not the same for all ranks.
    """
    ranks = runtime.ranks
    resolve_replaced(ranks, directory)
    damaged: dict[str, CheckpointError] = {}
    while True:
        found = ranks.on_rank_0(lambda: find_checkpoint(directory, tag, damaged))
        if found is None:
            if damaged:
                raise next(iter(damaged.values()))
            return None
        path, manifest = directory / found.tag, parse_manifest(directory / found.tag, found.manifest)
        how = {"moments": moments, "strict_model": strict_model, "all_weights": all_weights}
        # All ranks have the same model and manifest, so it is enough that one of them checks.
        ranks.on_rank_0(partial(check_fit, path, manifest, runtime, run, codes, **how))
        try:
            loaded = _verify(path, found, manifest, runtime, moments=moments)
        except CheckpointError as error:
            if tag is not None:
                raise
            damaged[found.tag] = error
            continue
        ranks.each(lambda: check(path, loaded.extra), "loading: what came with the tensors")  # noqa: B023 (called now)
        return loaded


def _verify(path: Path, found: Found, manifest: Manifest, runtime: Runtime, *, moments: bool) -> Loaded:
    """Verify everything that this rank will read. All ranks call this together; the error names the failed rank."""
    read: list[Loaded] = []

    def verify() -> None:
        if read_manifest_bytes(path) != found.manifest:
            raise CheckpointError(
                f"{path} is another checkpoint here than on rank 0: give all ranks one directory that they share, or "
                "copies of one checkpoint"
            )
        extra = read_extra(path, manifest)
        read.append(Loaded(path, manifest, _check_own(path, manifest, runtime, moments=moments), extra))

    runtime.ranks.each(verify, "loading: the check of the files")
    return read[0]


def _check_own(path: Path, manifest: Manifest, runtime: Runtime, *, moments: bool) -> Mapping[str, StoredTensor]:
    """Verify the slices that this rank will read. Return the checkpoint's tensors with their checksums."""
    ranks = runtime.ranks
    if manifest.has_whole_sums:  # one checksum a tensor: a slice cannot be verified alone
        return check_files(path, manifest.tensors, lambda nbytes: ranks.progress())
    slices = [
        slice_
        for unit in runtime.partition.units
        for part in runtime.partition.parts(unit)
        for slice_ in _slices(part, manifest, moments=moments)
    ]
    slices += [(f"{CODE_FIELD}.{name}", 0, stored.numel) for name, stored in manifest.stored(CODE_FIELD).items()]
    threads = CHECK_THREADS // ranks.neighbours
    check_slices(path, manifest.tensors, slices, threads=threads, progress=lambda nbytes: ranks.progress())
    return manifest.tensors


def _slices(part: ParamPart, manifest: Manifest, *, moments: bool) -> Iterator[tuple[str, int, int]]:
    """Yield (key, first element, number of elements) of each slice that is read for a part of a parameter."""
    name, start, stop = part.info.name, part.param.start, part.param.stop
    for key in (f"{MASTER_FIELD}.{name}", f"{FROZEN_FIELD}.{name}"):
        if key in manifest.tensors:
            yield key, start, stop - start
    if moments and part.info.trainable and f"{MASTER_FIELD}.{name}" in manifest.tensors:
        yield from moment_slices(manifest.layout, name, start, stop)[1]


def load_tensors(loaded: Loaded, runtime: Runtime, codes: Codes, *, moments: bool = True) -> None:
    """Read the parameters of a checkpoint into the tiers. No update may be pending. All ranks call this together.

    Args:
        codes: the codes of the model, which get the checkpoint's values.
        moments: load the moments, too, converted if they were saved in another state format. Otherwise they are set to
            zero, as are those of parameters that were frozen when the checkpoint was saved.

    Raises:
        CheckpointError: the files have changed since they were checked, or cannot be read any more. Some parameters
            may have their new values.
    """

    manifest = loaded.manifest

    def load() -> None:
        with StoredReader(loaded.path, loaded.tensors) as reader:
            trained, frozen = manifest.stored(MASTER_FIELD).keys(), manifest.stored(FROZEN_FIELD).keys()
            source = _Source(reader, trained, frozen, manifest.layout if moments else None)
            for unit in runtime.partition.units:
                _load_unit(unit, source, runtime)
            load_codes(reader, manifest, codes)

    try:
        runtime.ranks.each(load, "loading: the tensors")
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Some parameters had been loaded by then, so this engine trains and saves no more: close it, and "
            "load into a new one"
        ) from error


@dataclass(frozen=True)
class _Source:
    """Reads values of the checkpoint.

    Attributes:
        trained, frozen: names of the parameters in the checkpoint that were trained, or frozen, when it was saved.
        moments: format of the moments; None to set the moments to zero.
    """

    reader: StoredReader
    trained: Set[str]
    frozen: Set[str]
    moments: StateLayout | None

    def has(self, part: ParamPart) -> bool:
        """Whether the checkpoint has values of the parameter. Frozen parameters may have been left out."""
        return part.info.name in self.trained or part.info.name in self.frozen

    def weights(self, part: ParamPart) -> torch.Tensor:
        """Read a part of a parameter: from its master, or from its values if it was frozen."""
        field = MASTER_FIELD if part.info.name in self.trained else FROZEN_FIELD
        return self.reader.read(f"{field}.{part.info.name}", part.offset, part.stop - part.start)


def _load_unit(unit: UnitLayout, source: _Source, runtime: Runtime) -> None:
    if unit.runs:
        _compare_unit(unit, source, runtime)
        return
    with runtime.executor.changing(runtime.row(unit)) as flat:
        for part, states in runtime.trained_parts(unit, writable=True):
            _load_part(part, source, runtime.layout, flat[part.shard], states)
            runtime.ranks.progress()
        for part in runtime.partition.parts(unit):
            if not part.info.trainable and source.has(part):
                flat[part.shard].copy_(source.weights(part))


def _compare_unit(unit: UnitLayout, source: _Source, runtime: Runtime) -> None:
    """Check that a unit that is read in place has the checkpoint's values."""
    with runtime.executor.resident(runtime.row(unit)) as flat:
        for part in runtime.partition.parts(unit):
            if source.has(part) and not torch.equal(source.weights(part).to(flat.dtype), flat[part.shard]):
                raise CheckpointError(
                    f"`{part.info.name}` has other values than in {unit.runs[0].file.path.parent}, where it is used "
                    "and never written: take the weights that the checkpoint was trained on, or in_place=False"
                )


def _load_part(
    part: ParamPart,
    source: _Source,
    layout: StateLayout,
    param: torch.Tensor,
    states: Mapping[str, torch.Tensor],
) -> None:
    """Load a part of one trained parameter and of its moments."""
    write_master(layout, source.weights(part).float(), param, states)
    if source.moments is None or part.info.name not in source.trained:
        for field in layout.moment_fields:
            states[field.name].zero_()
        return
    start, stop = part.param.start, part.param.stop
    for name, values in moments_of(source.reader, source.moments, layout, part.info.name, start, stop).items():
        states[name].copy_(values)
