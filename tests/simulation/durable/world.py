"""The engine's commits, slots, swap files and checkpoints, over values that steps make up.

[Note: what is real]
`Session`, `Commits`, `BackgroundSave`, `Snapshot`, `Saving`, `open_run`, `SwapSpace` and all that they call are the
engine's own. In the place of the executor and the pipeline is `Trainer`: it says which tiles a step changes, and writes
them as the pipeline's worker does. In the place of an asynchronous I/O engine is `PlainEngine`.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from infinity.checkpoint.extra import Parts
from infinity.checkpoint.save import Options
from infinity.checkpoint.session import Session
from infinity.errors import InfinityError
from infinity.io import IoEngine, IoFile, IoFuture, IoStats, Priority, Span
from infinity.optim.formats import layout_with_moments
from infinity.optim.loss_scale import LossScale
from infinity.schedule.unit_state import Residency
from infinity.telemetry import Times
from infinity.tiers import Sharding
from infinity.tiers.striping import Stripe
from infinity.tiers.swap import SwapSpace
from infinity.zero.adoption import open_run
from infinity.zero.build import Runtime
from infinity.zero.groups import Groups
from infinity.zero.partition import Alignment, Partition, lay_out_unit
from infinity.zero.phases import Phase
from infinity.zero.ranks import ALONE
from infinity.zero.step_counter import StepCounter
from tests.simulation.durable.drive import BLOCK, Recorder, here
from tests.simulation.durable.turns import Gate, Result, TurnRanks, Turns

TILE = 1024  # elements: two blocks of states and one of parameters
TILES = 2
SHARD = TILE * TILES
_LAYOUT = layout_with_moments("fp32", "exp_avg", "exp_avg_sq")
_STATES, _PARAMS = _LAYOUT.tile_bytes(TILE), TILE * 4

BEFORE = hashlib.sha256(bytes(TILES * (_STATES + _PARAMS))).hexdigest()  # the digest before the first step


@dataclass(frozen=True)
class Layout:
    """Who has what.

    Attributes:
        drives: of each rank.
        apart: each rank saves in a directory that no other one sees.
    """

    ranks: int = 1
    drives: int = 1
    apart: bool = False

    def of_rank(self, rank: int) -> list[str]:
        """Directories of its slots."""
        return [f"drive-{rank}-{drive}" for drive in range(self.drives)]

    @property
    def slots(self) -> list[str]:
        return [name for rank in range(self.ranks) for name in self.of_rank(rank)]

    def saves(self, rank: int) -> str:
        """Its directory of checkpoints."""
        return f"checkpoints-{rank}" if self.apart else "checkpoints"

    @property
    def checkpoints(self) -> list[str]:
        return sorted({self.saves(rank) for rank in range(self.ranks)})


def blocks_of(newest: bytes) -> set[int]:
    """Blocks of a drive's file that hold a version: states in two slots, then parameters in two slots."""
    blocks, start = set(), 0
    for nbytes, bits in ((_STATES, newest[:TILES]), (_PARAMS, newest[TILES:])):
        for tile, slot in enumerate(bits):
            first = start + (slot * TILES + tile) * nbytes
            blocks |= set(range(first // BLOCK, (first + nbytes) // BLOCK))
        start += 2 * TILES * nbytes
    return blocks


class PlainFile(IoFile):
    def __init__(self, path: Path, source: Path) -> None:
        self.path, self.direct, self.alignment = path, False, 1
        self.descriptor = os.open(source, os.O_RDWR)

    def close(self) -> None:
        os.close(self.descriptor)


class _Over(IoFuture):
    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> int:
        return self._nbytes

    def times(self) -> Times | None:
        return None


class PlainEngine(IoEngine):
    """Reads and writes at once."""

    backend = "plain"

    def _open(self, source: Path, read_only: bool, name: Path) -> IoFile:
        return PlainFile(name, source)

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        memory = (ctypes.c_char * span.nbytes).from_address(span.address)
        descriptor = cast(PlainFile, file).descriptor
        return _Over((os.pwrite if write else os.preadv)(descriptor, memory if write else [memory], offset))  # type: ignore[arg-type]

    def stats(self) -> IoStats:
        return IoStats(0, 0, 0, 0)

    def close(self) -> None:
        pass


class Trainer:
    """What one rank has.

    Attributes:
        label: of the last step; every step of a search has a number of its own.
    """

    def __init__(self, root: Path, rank: int, layout: Layout, turns: Turns, *, keeps: bool) -> None:
        self.rank = rank
        self.label = 0
        self.loaded: str | None = None  # tag
        self._turns = turns
        self._saving: int | None = None  # label of a checkpoint on its way
        self.checkpoints = root / layout.saves(rank)
        self.flat = torch.zeros(SHARD)
        self._memory = [torch.zeros(_STATES, dtype=torch.uint8) for _ in range(TILES)]
        self.tiles = [
            (cast(Any, SimpleNamespace(start=i * TILE, numel=TILE)), _LAYOUT.views(memory, TILE))
            for i, memory in enumerate(self._memory)
        ]
        ranks = TurnRanks(rank, turns.size, neighbours=turns.size, turns=turns)
        self.swap = self._open([root / name for name in layout.of_rank(rank)], ranks) if keeps else SwapSpace((), ())
        unit = lay_out_unit(
            0,
            "unit",
            {"w": (SHARD * turns.size,)},
            {"w": 0},
            Alignment.of(_LAYOUT).for_ranks(turns.size),
            persistent=False,
        )
        self.pipeline = SimpleNamespace(
            before_update=None,
            tiles=lambda unit, writable: iter(self.tiles),
        )
        executor = SimpleNamespace(
            in_flight=SimpleNamespace(all_computed=True),
            compute_all=lambda: None,
            write_changed=lambda: None,
            take_over=self._take_over,
            units=[SimpleNamespace(residency=Residency.STORED)],
            resident=lambda unit: nullcontext(self.flat),
            changing=lambda unit: nullcontext(self.flat),
        )
        runtime = SimpleNamespace(
            ranks=ranks,
            swap=self.swap,
            layout=_LAYOUT,
            partition=Partition((unit,), (), Sharding(rank, turns.size)),
            groups=Groups(ranks, ranks, ALONE),
            executor=executor,
            row=lambda unit: unit,
            pipeline=self.pipeline,
            states=SimpleNamespace(some_are_on_device=False),
            counters=SimpleNamespace(aside=lambda what: nullcontext()),
            arena=SimpleNamespace(critical=nullcontext()),
            parts=SimpleNamespace(ranks=ALONE),
            show_newest=lambda: None,
        )
        runtime.trained_parts = partial(Runtime.trained_parts, cast(Any, runtime))
        self.step_ = SimpleNamespace(
            counter=StepCounter(1, counts_boundaries=True),
            updates=SimpleNamespace(steps={"w": 0}),
            losses=SimpleNamespace(loss_scale=LossScale.of(None)),
            lr_scheduler=None,
            keeper=None,
            at_end=None,
            at_rest=True,
            phase=Phase.IDLE,
            drain=lambda: None,
            check_boundary=lambda what: None,
            fail=lambda error: None,
        )
        optimizer = SimpleNamespace(
            state_dict=lambda: {"param_groups": []}, param_groups=[], defaults={}, load_groups=lambda groups: None
        )
        self.session = Session(nn.Module(), cast(Any, optimizer), cast(Any, runtime), cast(Any, self.step_))
        if self.session.commits is not None:
            self.session.keep_with_steps(lambda: {"label": self.label})

    # Its drive #

    def _open(self, directories: list[Path], ranks: TurnRanks) -> SwapSpace:
        run = open_run(directories, {"model": {"elements": SHARD}}, ranks)
        stripes = run.found.stripes if run.found else [Stripe(path, 1.0, sys.maxsize) for path in directories]
        swap = SwapSpace([PlainEngine()] * len(stripes), stripes, checksum=True, rank=self.rank, run=run)
        self._states = swap.reserve_slots(TILES * _STATES, [i * _STATES for i in range(TILES + 1)])
        self._params = swap.reserve_slots(TILES * _PARAMS, [i * _PARAMS for i in range(TILES + 1)])
        swap.create()
        swap.adopt()
        return swap

    def _spans(self, tile: int) -> Iterator[tuple[Any, Span, int]]:
        """Where a tile lies: its extents, memory and offsets."""
        states, flat = self._memory[tile], self.flat[tile * TILE : (tile + 1) * TILE]
        yield self._states, Span(states.data_ptr(), _STATES, states), tile * _STATES
        yield self._params, Span(flat.data_ptr(), _PARAMS, flat), tile * _PARAMS

    def _write(self, tile: int) -> None:
        for extent, span, offset in self._spans(tile):
            self.swap.write(extent, span, offset)

    def read(self) -> None:
        """All values are those of the drive."""
        for tile in range(TILES):
            for extent, span, offset in self._spans(tile):
                self.swap.read(extent, span, offset, priority=Priority.DEMAND).result()

    def places(self) -> Iterator[tuple[Path, int]]:
        """The first byte of every block of the newest version."""
        for extent in (self._states, self._params):
            for path, start, nbytes in self.swap.locate(extent, extent.nbytes):
                yield from ((path, offset) for offset in range(start, start + nbytes, BLOCK))

    def _take_over(self) -> None:
        for extent in (self._states, self._params):
            extent.take_found()
        self.read()

    @property
    def digest(self) -> str:
        """Of all values."""
        return hashlib.sha256(b"".join(each.numpy().tobytes() for each in (self.flat, *self._memory))).hexdigest()

    # What training does #

    def step(self, label: int, changed: range = range(TILES), undone: range = range(0)) -> None:
        """One step.

        Args:
            changed: its tiles.
            undone: tiles whose speculative update is rolled back.
        """
        commits = self.session.commits
        assert commits is not None
        if undone and self.pipeline.before_update is None:
            before = self.flat.clone(), [memory.clone() for memory in self._memory]
            for tile in undone:
                self._fill(tile, -label)
                self._write(tile)
            for extent in (self._states, self._params):
                self.swap.slots.roll_back(extent)
            self.flat.copy_(before[0])
            for memory, values in zip(self._memory, before[1], strict=True):
                memory.copy_(values)
        commits.before_updates()
        for tile in range(TILES):
            if self.pipeline.before_update is not None:
                self.pipeline.before_update(0, self.tiles[tile][0], self.flat, self.tiles[tile][1])
            if tile in changed:
                self._fill(tile, label)
                self._write(tile)
        self.label = label
        counts = self.step_.counter.counts
        self.step_.counter.counts = replace(
            counts, global_steps=counts.global_steps + 1, micro_steps=counts.micro_steps + 1
        )
        self.step_.updates.steps = {"w": self.step_.updates.steps["w"] + 1}
        commits.step_over()
        self._turns.labels[cast(Gate, commits._gate).key] = label
        if self.step_.at_end is not None:
            self.step_.at_end()

    def _fill(self, tile: int, label: int) -> None:
        values = label + self.rank / 4 + tile / 8 + torch.arange(TILE) / 65536
        self.flat[tile * TILE : (tile + 1) * TILE] = values
        for index, moment in enumerate(self.tiles[tile][1].values(), start=2):
            moment.copy_(values + index * 1000)

    def save(self, tag: str | None, *, keep_last: int | None = None, blocking: bool = True) -> None:
        state, options = {"label": self.label}, Options(frozen=False, keep_last=keep_last)
        self._saving = None
        self.session.save(self.checkpoints, tag, state, options=options, blocking=blocking)
        self._saving = self.label
        self.note_saved()

    def note_saved(self) -> None:
        """Tell of a checkpoint that is there now."""
        if self._saving is not None and self.session.saving is None:
            if self.session._background_error is None:
                self._turns.tell("saved", self._saving)
            self._saving = None

    def load(self, tag: str | None) -> int | None:
        """The label of what was loaded."""
        path, state = self.session.load(self.checkpoints, tag, Parts(), strict_model=True)
        self.loaded = None if path is None else path.name
        return None if state is None else int(state["label"])

    def tags(self) -> list[str]:
        """Of all checkpoints that can be seen."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return sorted(path.name for path in found if path.name[0] != "." and path.is_dir())

    def resume(self) -> int | None:
        """The label of the step that it goes on from."""
        _, state = self.session.resume()
        if state is None:
            return None
        self.label = int(state["label"])
        self._turns.tell("resumed", self.label)
        return self.label

    def drop(self) -> None:
        """Let go of descriptors; whatever this writes is in a directory that nobody looks at any more."""
        if self.session.commits is not None:
            atexit.unregister(self.session.commits._stop)
        with suppress(InfinityError):
            self.session.cancel_saving()
        self.session.unclaim()
        self.swap.close()


class World:
    """All ranks, on drives in one directory.

    Args:
        keeps: every step is committed; else they are there for checkpoints alone.
    """

    def __init__(self, root: Path, layout: Layout, recorder: Recorder | None = None, *, keeps: bool = True) -> None:
        self.trainers: dict[int, Trainer] = {}
        self.turns = Turns(layout.ranks, recorder)
        self._layout = layout
        self.turns.commit = self._commit
        self._root = root
        self._keeps = keeps

    def open(self) -> list[Exception | None]:
        """As `infinity.initialize` does."""

        def begin(rank: int) -> None:
            self.trainers[rank] = Trainer(self._root, rank, self._layout, self.turns, keeps=self._keeps)

        return self.turns.run(begin)

    def each(self, action: Callable[[Trainer], Result]) -> list[Result | Exception]:
        return self.turns.run(lambda rank: action(self.trainers[rank]))

    def note_saved(self) -> None:
        """Tell of checkpoints that are there now."""
        for trainer in self.trainers.values():
            here.lane = f"rank {trainer.rank}"
            trainer.note_saved()

    def _commit(self, rank: int) -> None:
        """What is closed is committed now."""
        commits, lane = self.trainers[rank].session.commits, here.lane
        assert commits is not None
        here.lane = f"commits {rank}"
        self.turns.hear(*self.turns.closed[rank])
        commits._queue.put(None)
        commits._work()
        if self.turns.recorder is not None:
            self.turns.recorder.look()
        here.lane = lane

    @contextmanager
    def dropped(self) -> Iterator[World]:
        """Its descriptors are closed at the end."""
        try:
            yield self
        finally:
            here.lane, here.turns = "dropped", self.turns
            for trainer in self.trainers.values():
                trainer.drop()
