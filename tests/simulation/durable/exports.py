"""Exports of weights: each replaces the one before, and a crash leaves one that is whole or one that is refused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from infinity.checkpoint.export import write_model
from infinity.checkpoint.pretrained import PretrainedWeights
from infinity.errors import InfinityError
from tests.simulation.durable.drive import ROOT, Cached, Disk, Hear, Image, Recorder, Tell, losses
from tests.simulation.durable.history import Last, Violation, cuts, directory
from tests.simulation.durable.search import Counts, told_of
from tests.simulation.durable.turns import Numbers, in_turns

NAMES = ("first", "second")
KINDS = {"shards": (4096, 0), "file": (None, 0), "other shards": (4096, 1)}  # bytes of a shard, configuration
_FOLDER, _CONFIG = "exported", "config.json"


def _export(path: Path, kind: str, label: int) -> None:
    """All values are the label."""
    nbytes, config = KINDS[kind]

    def save(target: Path) -> None:
        (target / _CONFIG).write_text(str(config))

    model = SimpleNamespace(config=SimpleNamespace(save_pretrained=save))
    values = [(name, torch.full((1024,), float(label))) for name in NAMES]
    specs = dict.fromkeys(NAMES, (torch.float32, (1024,)))
    write_model(path, cast(Any, model), values, specs, dtype=torch.float32, shard_bytes=nbytes)


def _read(disk: Disk) -> tuple[set[float], int] | str:
    """Values and the configuration, or a refusal."""
    model = nn.ParameterDict({name: torch.zeros(1024) for name in NAMES})
    with directory() as root:
        disk.build(root)
        try:
            weights = PretrainedWeights(root / _FOLDER, model)
            values = {float(each) for name in NAMES for each in weights.read(name).unique()}
            config = root / _FOLDER / _CONFIG
            return values, int(config.read_text() or -1) if config.exists() else -1
        except InfinityError as error:
            return type(error).__name__


def search(kinds: Sequence[str], most: int) -> Counts:
    """Crashes in the last of some exports into one directory."""
    counts, seen = Counts(sequences=1), dict[Image, Any]()
    with directory() as root, in_turns(Numbers()):
        recorder = Recorder(root, Disk(directories={ROOT: {}}))
        before, start = Cached(Disk(directories={ROOT: {}}), []), 0
        for label, kind in enumerate(kinds, start=1):
            for _, event in recorder.events[start:]:
                if not isinstance(event, Tell | Hear):
                    before.take(event)
            start = len(recorder.events)
            with recorder.attached():
                _export(root / _FOLDER, kind, label)
            recorder.add(Tell(("exported", label)))
        recorder.close()
    now, label = KINDS[kinds[-1]][1], len(kinds)
    older = ({float(label - 1)}, KINDS[kinds[-2]][1]) if label > 1 else None
    for cached, told in cuts(Last(before, frozenset(), recorder.events[start:], [])):
        counts.crash_points += 1
        for kept in losses(len(cached.waiting), most):
            counts.states += 1
            disk = cached.after(kept)
            image = disk.image(disk.at(_FOLDER))
            if image not in seen:
                seen[image] = _read(disk)
                counts.examined += 1
            found = seen[image]
            right = found == ({float(label)}, now) or (not told and (found == older or isinstance(found, str)))
            if not right:
                raise Violation(f"export {kinds} has {found}: {told_of(cached, kept)}")
            if isinstance(found, str):
                counts.refused[f"{found} of an export"] += 1
            else:
                counts.loaded += 1
    return counts


def sequences(length: int) -> list[tuple[str, ...]]:
    """All of up to so many exports."""
    return [each for count in range(1, length + 1) for each in itertools.product(KINDS, repeat=count)]
