"""Find, open and check the files of a DeepSpeed checkpoint (ZeRO 1, 2 and 3)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.checkpoint.directory import check_tag, latest_tag
from infinity.checkpoint.files import brief
from infinity.checkpoint.pickles import ForeignObject, read_pickle
from infinity.errors import CheckpointError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
_FOREIGN = (
    (re.compile(r"(?:.*_)?expert_\d+.*\.pt|expp_rank_\d+.*\.pt"), "experts that are divided among ranks"),
    (re.compile(r"layer_\d+-.*model_states\.pt"), "the layers of pipeline parallelism"),
)
_GLOBAL_STEPS = "global_steps"


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The content of the files of all ranks. Large tensors stay in the files.

    Attributes:
        path: the checkpoint's directory.
        models: model states by rank; a single one at stages 1 and 2, where they are the same for all ranks.
        optimizers: optimizer states by rank.
        level: the stage of ZeRO, 1 to 3.
    """

    path: Path
    models: tuple[Mapping[str, Any], ...]
    optimizers: tuple[Mapping[str, Any], ...]
    level: int

    @property
    def ranks(self) -> int:
        return len(self.optimizers)

    @property
    def slices(self) -> bool:
        """Whether every parameter is cut into a slice for each rank (stage 3). Otherwise every group is."""
        return self.level == 3

    def states(self, rank: int) -> Mapping[str, Any]:
        """Return the states of a rank's ZeRO optimizer. Raises as `states_of`."""
        return states_of(self.optimizers[rank], self.path)

    def base_states(self, rank: int) -> Any:
        """Return the states of the optimizer that a rank's ZeRO optimizer wraps; None if there are none."""
        return self.states(rank).get("optimizer_state_dict" if self.slices else "base_optimizer_state")

    @property
    def param_groups(self) -> list[Mapping[str, Any]]:
        """The parameter groups of the wrapped optimizer; empty if the checkpoint has none."""
        base = self.base_states(0)
        groups = base.get("param_groups") if isinstance(base, Mapping) else None
        return groups if isinstance(groups, list) else []


def is_deepspeed(path: Path) -> bool:
    """Whether a directory has files of a DeepSpeed checkpoint."""
    return path.is_dir() and any(_MODEL.fullmatch(file.name) for file in path.iterdir())


def deepspeed_at(source: Path, tag: str | None = None) -> Path:
    """Return the path of a checkpoint: `source / tag`, `source` itself, or what `latest` in directory `source` names.

    Raises:
        CheckpointError: there is no checkpoint of DeepSpeed.
        ConfigError: `tag` is no plain name.
    """
    path = source
    if tag is not None:
        check_tag(tag)
        path = source / tag
    elif not is_deepspeed(source):
        latest = latest_tag(source)
        path = source if latest is None else source / latest
    if not is_deepspeed(path):
        raise CheckpointError(f"{path} has no mp_rank_*_model_states.pt: it is no checkpoint of DeepSpeed")
    return path


def read_files(path: Path) -> DeepSpeedFiles:
    """Open the files of all ranks.

    Raises:
        CheckpointError: a file is missing or cannot be read, or the checkpoint is of a kind that cannot be imported.
    """
    names = sorted(file.name for file in path.iterdir())
    for name in names:
        for pattern, what in _FOREIGN:
            if pattern.fullmatch(name):
                raise CheckpointError(f"{path} cannot be imported: {name} has {what}, which the engine does not train")
    models, optimizers = _by_rank(path, names, _MODEL), _by_rank(path, names, _OPTIM)
    if (path / "zero").is_dir():
        raise CheckpointError(f"{path} is a universal checkpoint: import the one that it was made of")
    if not optimizers:
        raise CheckpointError(
            f"{path} has no zero_pp_rank_*_optim_states.pt: it was saved without ZeRO (stage 0), or without its "
            "optimizer. Weights alone are taken by infinity.from_pretrained, or by load_state_dict before initialize"
        )
    read = tuple(read_pickle(path / name) for name in optimizers)
    found = DeepSpeedFiles(path, tuple(read_pickle(path / name) for name in models), read, _level(path, read))
    _check(found)
    return found


def _by_rank(path: Path, names: list[str], pattern: re.Pattern[str]) -> list[str]:
    """Return the file names that match, by rank. Refuse missing or double ranks, and model parallelism."""
    found: dict[int, str] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        if int(match["part"]):
            raise CheckpointError(
                f"{path} cannot be imported: {name} is a part of a model that model parallelism divides. Bring it into "
                "one part with the library that divided it"
            )
        rank = int(match["rank"] or 0)
        if rank in found:
            raise CheckpointError(f"{path} has both {found[rank]} and {name}: remove the older one")
        found[rank] = name
    for rank in range(len(found)):
        if rank not in found:
            here = next(iter(found.values()))
            raise CheckpointError(f"{path} has {here}, but no file of rank {rank}: copy the files of all ranks here")
    return [found[rank] for rank in range(len(found))]


def states_of(optimizer: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the states in one rank's optimizer file. Raise CheckpointError if there are none."""
    states = optimizer.get("optimizer_state_dict")
    if not isinstance(states, Mapping):
        raise CheckpointError(f"{path} has no optimizer states (`optimizer_state_dict`)")
    return states


def _level(path: Path, optimizers: tuple[Mapping[str, Any], ...]) -> int:
    states = states_of(optimizers[0], path)
    level = states.get("zero_stage", 1)  # the bf16 optimizer shards as stage 1 does, and saves no stage
    if isinstance(level, ForeignObject):  # a member of DeepSpeed's enumeration
        level = level.arguments[0] if level.arguments else None
    if level not in (1, 2, 3):
        raise CheckpointError(f"{path} is of ZeRO stage {brief(level)}; 1, 2 and 3 can be imported")
    return int(level)


def _check(files: DeepSpeedFiles) -> None:
    """Refuse files that are not those of one checkpoint."""
    path = files.path
    counts = {_partition_count(states_of(optimizer, path)) for optimizer in files.optimizers}
    if counts != {files.ranks}:
        raise CheckpointError(
            f"{path} was saved by {', '.join(map(str, sorted(counts)))} ranks, and has the optimizer states of "
            f"{files.ranks}: copy the files of all ranks here, and no others"
        )
    expected = files.ranks if files.slices else 1
    if len(files.models) != expected:
        raise CheckpointError(
            f"{path} has {len(files.models)} files of model states; stage {files.level} on {files.ranks} ranks saves "
            f"{expected}"
        )
    for rank, model in enumerate(files.models):
        if model.get(_GLOBAL_STEPS) != files.models[0].get(_GLOBAL_STEPS):
            raise CheckpointError(f"{path} has files of several steps: rank {rank}'s is not that of rank 0")


def _partition_count(states: Mapping[str, Any]) -> int:
    count = states.get("partition_count")
    counts = count if isinstance(count, list | tuple) else [count]
    found = {int(number) for number in counts if isinstance(number, int)}
    if len(found) != 1:
        raise CheckpointError(f"`partition_count` is {brief(count)}: its groups are divided among unlike ranks")
    return found.pop()
