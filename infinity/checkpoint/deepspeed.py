"""Import DeepSpeed's checkpoints of ZeRO 1, 2 and 3: weights, masters, moments and the rest of the training state.

[Note: how ZeRO lays parameters out]
At stages 1 and 2 each parameter group is one flat float32 tensor: its parameters one after another in the order of
`param_shapes`, with padding at the end (and between them, if `parameter_alignment` is set). A rank stores one slice of
it. The masters are stored without the padding at the end; the moments may have it.
At stage 3 each parameter is padded to a multiple of the ranks and cut into one slice for each rank. A rank stores its
slices of all parameters one after another, in the order of `param_shapes`, cut into sub-groups at any element: the
masters in `fp32_flat_groups`, the moments in the optimizer's `state`, by number of the sub-group. A frozen parameter is
stored whole at stages 1 and 2, and in slices at stage 3.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.conversion import Progress
from infinity.checkpoint.deepspeed_files import DeepSpeedFiles, deepspeed_at, read_files
from infinity.checkpoint.deepspeed_progress import counters_of, extra_of
from infinity.checkpoint.files import brief
from infinity.checkpoint.imported import (
    KINDS,
    Foreign,
    ForeignParam,
    Pieces,
    Values,
    Zeros,
    named_as_damaged,
    unknown_kind,
    write_imported,
)
from infinity.checkpoint.pickles import ForeignObject
from infinity.errors import CheckpointError

_log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def import_deepspeed(
    source: Path, target: Path, *, tag: str | None = None, progress: Progress = lambda done, total: None
) -> Path:
    """Convert a checkpoint of DeepSpeed to one of the engine. No code of the checkpoint is executed.

    Args:
        source: the checkpoint, or a directory of checkpoints.
        target: a directory of checkpoints. The new one gets the same tag and is loaded by default.
        tag: the checkpoint in the directory `source`; by default the one that its file `latest` names.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete, or of a kind that cannot be imported.
        StorageError: writing failed.
    """
    path = deepspeed_at(source, tag)
    if target.resolve() in (path.resolve(), path.resolve().parent):
        raise CheckpointError(f"{target} has the checkpoint of DeepSpeed in it: give the new one another directory")
    files = read_files(path)
    with named_as_damaged(path):
        foreign = describe(files)
        for note in foreign.notes:
            _log.warning("%s: %s", path, note)
        return write_imported(target, foreign, progress)


def describe(files: DeepSpeedFiles) -> Foreign:
    """Return the content of the files, without reading the values of parameters.

    Raises:
        CheckpointError: the files contradict each other or are damaged.
    """
    path, model = files.path, files.models[0]
    groups = _param_shapes(path, model)
    moments = _moments(files)
    trained = _stage_3(files, groups, moments) if files.slices else _stage_1_and_2(files, groups, moments)
    params = list(trained)
    params += _frozen(files, {param.name for param in params})
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        raise CheckpointError(f"{path} has a parameter twice")
    extra, notes = extra_of(files, param_names=frozenset(names))
    return Foreign(path.name, params, moments.kind, counters_of(files), extra, notes)


def _param_shapes(path: Path, model: Mapping[str, Any]) -> list[Shapes]:
    """Return names and shapes of the trained parameters, by group (of any size at stage 3)."""
    shapes = model.get("param_shapes")
    groups = [shapes] if isinstance(shapes, Mapping) else shapes  # versions before 0.4 had one group
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{path} has no `param_shapes` in its model states: it was not saved by ZeRO")
    return [{str(name): _shape(path, name, shape) for name, shape in group.items()} for group in groups]


def _shape(path: Path, name: Any, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(f"{path} has {brief(shape)} for the shape of {brief(name)}")
    return tuple(shape)


# The optimizer's states #


@dataclass(frozen=True)
class _Moments:
    """The moments of the checkpoint.

    Attributes:
        names: DeepSpeed's name of each moment, by the engine's name.
        kind: the engine's names of the two moments, as in a manifest.
        slots: the optimizer's state of each flat tensor, by rank and index of the tensor.
        steps: number of updates of each flat tensor.
    """

    names: Mapping[str, str]
    kind: tuple[str | None, str | None]
    slots: tuple[tuple[Mapping[str, Any], ...], ...]
    steps: tuple[int, ...]

    def flat(self, rank: int, index: int, here: str, numel: int) -> torch.Tensor | None:
        """Return a moment of a flat tensor of `numel` elements, by the engine's name; None if it is zero."""
        found = self.slots[rank][index].get(self.names[here])
        if found is None:
            return None
        if not isinstance(found, torch.Tensor) or found.numel() < numel or not found.is_floating_point():
            raise CheckpointError(
                f"rank {rank} has {brief(found)[:80]} as {self.names[here]} of a group of {numel} elements; states "
                "that DeepSpeed kept on NVMe are not in its checkpoint: save it with the optimizer on the CPU"
            )
        return found.reshape(-1)[:numel]


def _moments(files: DeepSpeedFiles) -> _Moments:
    flats = [len(_flats(files, rank)) for rank in range(files.ranks)]
    slots = tuple(_slots(files, rank, flats[rank]) for rank in range(files.ranks))
    found = {
        frozenset(key for key, value in slot.items() if isinstance(value, torch.Tensor) and key != "step")
        for of_rank in slots
        for slot in of_rank
    } - {frozenset()}
    groups = files.param_groups
    kept_by_sgd = any("momentum" in group and "dampening" in group for group in groups)
    if not found and kept_by_sgd:
        found = {frozenset({"momentum_buffer"})}
    if not found and any("betas" in group for group in groups) and not files.models[0].get("global_steps"):
        found = {frozenset({"exp_avg", "exp_avg_sq"})}  # Adam, before the first update
    unknown = frozenset({"momentum_buffer"}) in found and not kept_by_sgd  # Muon's
    renamed = {"exp_avg_sq": "sum"} if found == {frozenset({"exp_avg_sq"})} else {}  # DeepSpeed's own Adagrad
    names = {renamed.get(key, key): key for keys in found for key in sorted(keys)}
    kind = KINDS.get(frozenset(names))
    if len(found) != 1 or kind is None or unknown:
        raise unknown_kind(files.path, found)
    return _Moments(names, kind, slots, _steps(files, slots))


def _steps(files: DeepSpeedFiles, slots: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, ...]:
    """Return the number of updates of each flat tensor."""
    model, groups = files.models[0], files.param_groups or [{}]
    made = max(0, int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0))
    shared = files.states(0).get("base_optimizer_state_step")
    steps = []
    for index, slot in enumerate(slots[0]):
        step = slot.get("step", shared)
        if step is None and index < len(groups) and not files.slices:
            step = groups[index].get("step")
        if step is None:
            step = groups[0].get("step", made)
        steps.append(int(step))
    return tuple(steps)


def _slots(files: DeepSpeedFiles, rank: int, count: int) -> tuple[Mapping[str, Any], ...]:
    """Return the optimizer's state of each flat tensor of a rank."""
    base = files.base_states(rank)
    if not isinstance(base, Mapping):
        how = "by elastic_checkpoint: switch that off, and save it again" if isinstance(base, list) else "without them"
        raise CheckpointError(f"{files.path} has no optimizer states of rank {rank}: it was saved {how}")
    slots = [base.get("state", {}).get(index) for index in range(count)]
    return tuple(slot if isinstance(slot, Mapping) else {} for slot in slots)


def _flats(files: DeepSpeedFiles, rank: int) -> list[torch.Tensor]:
    """Return a rank's flat masters: a slice of each group or, at stage 3, its sub-groups."""
    key = "fp32_flat_groups" if files.slices else "single_partition_of_fp32_groups"
    flats = files.states(rank).get(key)
    if not isinstance(flats, list) or not all(isinstance(flat, torch.Tensor) for flat in flats):
        raise CheckpointError(f"{files.path} has no `{key}` of rank {rank}: its masters were not saved")
    return [flat.reshape(-1) for flat in flats]


# Stages 1 and 2 #


def _stage_1_and_2(files: DeepSpeedFiles, groups: Sequence[Shapes], moments: _Moments) -> Iterator[ForeignParam]:
    flats = [_flats(files, rank) for rank in range(files.ranks)]
    for of_rank in flats:
        if len(of_rank) != len(groups):
            raise CheckpointError(f"{files.path} has {len(of_rank)} flat groups for {len(groups)} of `param_shapes`")
    for index, shapes in enumerate(groups):
        lengths = [of_rank[index].numel() for of_rank in flats]
        offsets = _offsets(files, index, shapes, lengths)
        master = Pieces(tuple(of_rank[index] for of_rank in flats))
        of_group: dict[str, Values] = {}
        for name in moments.names:
            pieces = [moments.flat(rank, index, name, numel) for rank, numel in enumerate(lengths)]
            of_group[name] = _values(files, name, pieces, moments.steps[index])
        for name, shape in shapes.items():
            of_param = {moment: _Part(values, offsets[name]) for moment, values in of_group.items()}
            yield ForeignParam(name, shape, _Part(master, offsets[name]), of_param, moments.steps[index])


def _offsets(files: DeepSpeedFiles, group: int, shapes: Shapes, lengths: Sequence[int]) -> dict[str, int]:
    """Return where each parameter begins in its group's flat tensor. `lengths` are the elements that each rank has."""
    paddings = _saved_for(files, 0, "param_alignment_paddings", group)
    offsets, stop = {}, 0
    for position, (name, shape) in enumerate(shapes.items()):
        offsets[name] = stop
        stop += math.prod(shape) + (int(paddings[position]) if paddings else 0)
    there, padding = sum(lengths), max(4096 * files.ranks, lengths[0])  # the bf16 optimizer stores the padding, too
    if not stop <= there < stop + padding:
        raise CheckpointError(f"{files.path}: group {group} has {there} elements for parameters of {stop}")
    for rank in range(files.ranks):
        first = sum(lengths[:rank])
        for name, place in (_saved_for(files, rank, "param_slice_mappings", group) or {}).items():
            start, numel = _address(place)
            wanted = max(offsets.get(name, -1), first)
            if numel and first + start != wanted:
                raise CheckpointError(
                    f"{files.path}: rank {rank} has `{name}` from element {start} of group {group}, where "
                    f"`param_shapes` has it from {wanted - first}: its files are not of one checkpoint"
                )
    return offsets


def _saved_for(files: DeepSpeedFiles, rank: int, key: str, group: int) -> Any:
    """Return what a rank has saved for a group under `key`; None if its version of DeepSpeed does not save it."""
    noted = files.states(rank).get(key)
    return noted[group] if isinstance(noted, list) and group < len(noted) else None


def _address(place: Any) -> tuple[int, int]:
    """Return (first element, number of elements) of a slice; `place` stands for an object of DeepSpeed's class."""
    if isinstance(place, ForeignObject) and isinstance(place.get("start"), int):
        return place.get("start"), place.get("numel")
    return 0, 0


@dataclass(frozen=True)
class _Part:
    """A range of other values, from element `offset` on."""

    whole: Values
    offset: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Values`."""
        return self.whole.read(self.offset + start, self.offset + stop)


def _values(files: DeepSpeedFiles, name: str, pieces: Sequence[torch.Tensor | None], step: int) -> Values:
    """Return a moment of a flat tensor. Before the first update, all ranks may lack it: it is zero."""
    found = tuple(piece for piece in pieces if piece is not None)
    if len(found) == len(pieces):
        return Pieces(found)
    if found or (step and name != "momentum_buffer"):  # SGD without momentum keeps none
        raise CheckpointError(f"{files.path} has no {name} on some ranks, after {step} updates")
    return Zeros()


# Stage 3 #


def _stage_3(files: DeepSpeedFiles, groups: Sequence[Shapes], moments: _Moments) -> Iterator[ForeignParam]:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    flats = [_flats(files, rank) for rank in range(files.ranks)]
    wanted = sum(_slice_numel(files, shape) for shape in shapes.values())
    for rank, of_rank in enumerate(flats):
        there = sum(flat.numel() for flat in of_rank)
        if there != wanted or [flat.numel() for flat in of_rank] != [flat.numel() for flat in flats[0]]:
            raise CheckpointError(
                f"{files.path}: rank {rank} has {there} elements, its slices of all parameters are {wanted}. Were "
                "parameters divided among a part of the ranks alone (MiCS, zero_hpz)? Those cannot be imported"
            )
    steps = set(moments.steps)
    if len(steps) > 1:
        raise CheckpointError(f"{files.path}: its sub-groups have had unlike numbers of updates, {sorted(steps)}")
    step = steps.pop() if steps else 0
    masters = [Pieces(tuple(of_rank)) for of_rank in flats]
    rank_moments: dict[str, list[Values]] = {
        name: [
            _values(files, name, [moments.flat(rank, i, name, flat.numel()) for i, flat in enumerate(of_rank)], step)
            for rank, of_rank in enumerate(flats)
        ]
        for name in moments.names
    }
    offset = 0
    for name, shape in shapes.items():
        numel = _slice_numel(files, shape)
        of_param: dict[str, Values] = {
            moment: _Sliced(tuple(_Part(one, offset) for one in values), numel)
            for moment, values in rank_moments.items()
        }
        master = _Sliced(tuple(_Part(one, offset) for one in masters), numel)
        yield ForeignParam(name, shape, master, of_param, step)
        offset += numel


def _slice_numel(files: DeepSpeedFiles, shape: tuple[int, ...]) -> int:
    """Return the number of elements of a parameter in each rank's slice, padding included."""
    return -(-math.prod(shape) // files.ranks)


@dataclass(frozen=True)
class _Sliced:
    """A parameter in slices of equal length, one for each rank, in the order of the ranks."""

    slices: tuple[Values, ...]
    numel: int

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Values`."""
        found = []
        for index, values in enumerate(self.slices):
            low, high = max(start - index * self.numel, 0), min(stop - index * self.numel, self.numel)
            if low < high:
                found.append(values.read(low, high))
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, device="cpu")


# Frozen parameters #


def _frozen(files: DeepSpeedFiles, trained: Set[str]) -> Iterator[ForeignParam]:
    """Yield the frozen parameters: from fragments at stage 3, from the module's state dict at stages 1 and 2."""
    path = files.path
    if not files.slices:
        yield from _frozen_whole(files.models[0], trained)
        return
    for name, shape in (files.models[0].get("frozen_param_shapes") or {}).items():
        wanted = _shape(path, name, shape)
        numel = _slice_numel(files, wanted)
        slices = []
        for rank, model in enumerate(files.models):
            fragment = (model.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(fragment, torch.Tensor) or fragment.numel() != numel:
                raise CheckpointError(
                    f"{path} has no {numel} elements of the frozen parameter {brief(name)} of rank {rank}: save the "
                    "checkpoint with its frozen parameters"
                )
            slices.append(Pieces((fragment,)))
        yield ForeignParam(name, wanted, _Sliced(tuple(slices), numel))


def _frozen_whole(model: Mapping[str, Any], trained: Set[str]) -> Iterator[ForeignParam]:
    module = model.get("module")
    others = {*trained, *(model.get("buffer_names") or []), *(model.get("shared_params") or {})}
    for name, value in (module if isinstance(module, Mapping) else {}).items():
        if name not in others and isinstance(value, torch.Tensor) and value.is_floating_point():
            yield ForeignParam(str(name), tuple(value.shape), Pieces((value,)))
