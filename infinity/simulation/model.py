"""What is simulated: a model, its budgets, and what a training loop calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from random import Random

from infinity.simulation.clock import Tempo

SCHEDULES = ("backward", "deferred", "speculative", "barrier")
STAGING_UNITS = 3  # as in infinity/schedule/needs.py
FAULTS = ("fetch", "write", "update", "spill", "unspill", "states read", "states write")
SAVING_FAULTS = ("activation write", "activation read")


@dataclass(frozen=True)
class UnitSpec:
    """A unit.

    Attributes:
        offloaded: its parameters come and go.
        grads: where its gradients have memory: "own", a "slot", or "shared" bytes; "" if it is frozen.
        on_device: its optimizer states are where the model computes.
        old_params: where a speculative update keeps what it replaces: "slots", "states", "images" or "" (nowhere).
        is_double_buffered: the drive has two of each tile.
        reversible: tiles that a speculative update can undo.
        reconstructs: its gradients can be reconstructed from the optimizer states.
        made: its first values are made in memory.
        streams: its gradients leave the device while that computes on.
        host: its home is host memory, apart from what is computed on; else a drive.
        stored: tiles, the first ones, whose optimizer states live on the drive and pass through the ring.
        parts: some of its gradients come with each use in a pass; else their sum comes with the last one.
        saves: sizes of tensors that each forward of it saves for backward.
        comes: its optimizer states may come to the device after the first step.
    """

    nbytes: int
    tiles: int = 1
    offloaded: bool = True
    grads: str = "own"
    grad_bytes: int = 1
    on_device: bool = False
    old_params: str = ""
    is_double_buffered: bool = False
    reversible: int = 1
    reconstructs: bool = False
    made: bool = False
    streams: bool = False
    host: bool = False
    parts: bool = False
    stored: int = 0
    saves: tuple[int, ...] = ()
    comes: bool = False

    @property
    def on_drive(self) -> Collection[int]:
        """Tiles whose optimizer states live on the drive."""
        return range(self.stored)

    @property
    def has_device_shard(self) -> bool:
        """The values that come and go have their home on the device, too, and may be updated there at any time."""
        return self.on_device and self.offloaded


@dataclass(frozen=True)
class RankSpec:
    """One process: its memory for parameters, and how long its operations take."""

    capacity: int
    tempo: Tempo = field(default_factory=Tempo)


@dataclass(frozen=True)
class Config:
    """All that does not change during the training.

    Attributes:
        schedule: when the optimizer runs.
        slots, shared_bytes: for gradients of units without memory of their own.
        keeps: each step is committed, and survives a crash.
        images: tiles that the undo log has room for.
        ahead_bytes: of units that are gathered ahead, beyond the next one.
        staging_bytes: host memory that units pass through where the device has a memory of its own; 0 if it has none.
        ring: slots for tiles of optimizer states on their way.
        gathers: each of several ranks has a part of every unit, and all parts are gathered for a use.
        saved: memory for saved activations, in sizes of tensors; 0 if they stay where the model computes.
        saved_on_drive: they go on to a drive.
        device_bytes: device memory for optimizer states that come, and for what a step needs beside them.
        refused: the device has no memory in one piece for the unit that would be the so many-th to come; 0 if it has.
        writes_all: each update is written home.
    """

    units: tuple[UnitSpec, ...]
    ranks: tuple[RankSpec, ...]
    schedule: str = "deferred"
    slots: int = 0
    shared_bytes: int = 0
    keeps: bool = False
    images: int = 0
    ahead_bytes: int = 0
    staging_bytes: int = 0
    gathers: bool = True
    ring: int = 0
    saved: int = 0
    saved_on_drive: bool = False
    device_bytes: int = 0
    refused: int = 0
    writes_all: bool = False


@dataclass(frozen=True)
class Pass:
    """A micro-batch, forward and backward, or an evaluation.

    Attributes:
        uses: units that a module computes on together, module by module.
        looks: at a unit, before the use at this position; backward's uses follow forward's.
        stop: before this position the user's code raises; `inside`: within its module.
        micro_batches: positions in `uses` that each of several layer-major micro-batches goes through; empty if the
            pass is one micro-batch.
        absent: positions that each rank leaves out, as experts that its batch does not reach; empty if none does.
        segment: modules whose forward runs again before their backward, as with checkpoints; 0 if none does.
        nested: a module's forward runs again within its backward.
        elements: size of the batch, on which the need of device memory depends.
    """

    uses: tuple[tuple[int, ...], ...]
    evaluates: bool = False
    looks: tuple[tuple[int, int], ...] = ()
    stop: int | None = None
    inside: bool = False
    micro_batches: tuple[tuple[int, ...], ...] = ()
    absent: tuple[tuple[int, ...], ...] = ()
    segment: int = 0
    nested: bool = False
    elements: int = 1

    def of(self, rank: int) -> list[int]:
        """Positions that a rank goes through; all of them for none."""
        absent = self.absent[rank] if 0 <= rank < len(self.absent) else ()
        return [position for position in range(len(self.uses)) if position not in absent]

    def again(self, position: int) -> range:
        """Positions whose forward runs again with the backward of this one."""
        if not self.segment or (position + 1 < len(self.uses) and (position + 1) % self.segment):
            return range(0)
        return range(position // self.segment * self.segment, position + 1)


@dataclass(frozen=True)
class Step:
    """`engine.step()`: the gradients' norm is "quiet", "clipped" or "overflow"; the user's scheduler may raise then."""

    norm: str = "quiet"
    raises: bool = False


@dataclass(frozen=True)
class Look:
    """Parameters are wanted, of several units at once perhaps; `whole` if all ranks want them together."""

    units: tuple[int, ...]
    whole: bool = False


@dataclass(frozen=True)
class Change:
    """The user writes a unit's parameters."""

    unit: int


@dataclass(frozen=True)
class ZeroGrad:
    """`engine.zero_grad()`."""


@dataclass(frozen=True)
class Drain:
    """Every update is carried out, as before a save."""


@dataclass(frozen=True)
class Fault:
    """On one rank, the next operation of a kind fails."""

    rank: int
    kind: str


@dataclass(frozen=True)
class Death:
    """One rank's process dies after so many ticks."""

    rank: int
    ticks: int


@dataclass(frozen=True)
class Interrupt:
    """The user interrupts one rank's process after so many ticks."""

    rank: int
    ticks: int


Call = Pass | Step | Look | Change | ZeroGrad | Drain | Fault | Death | Interrupt


@dataclass(frozen=True)
class Scenario:
    """A world and what happens in it.

    Attributes:
        seed: of how long each operation takes.
    """

    config: Config
    calls: tuple[Call, ...]
    seed: int = 0


@dataclass(frozen=True)
class Loop:
    """What a training loop repeats.

    Attributes:
        uses: units that a module computes on together, module by module, in a pass that goes through all branches.
        accumulation: micro-batches of a step; None where that is drawn.
        norms: what a step's may be, the usual one first, and as often as it is more usual.
        rare: probabilities of what is rare, of which one is drawn.
        waits_for_updates: a step is over when every update is.
        layer_major: micro-batches of a step that go through each module together; 0 if they come one by one.
    """

    uses: tuple[tuple[int, ...], ...]
    accumulation: int | None = None
    norms: tuple[str, ...] = ("quiet", "quiet", "quiet", "clipped", "overflow")
    rare: tuple[float, ...] = (0.0, 0.05, 0.2)
    waits_for_updates: bool = False
    layer_major: int = 0


def calls_of(loop: Loop, random: Random, config: Config, steps: int) -> tuple[Call, ...]:
    """What a training loop calls in so many steps, and what happens to it; of more steps the first are the same."""
    rare = random.choice(loop.rare)
    branches = random.random() < 0.3
    accumulation = 1 if loop.layer_major else loop.accumulation or random.choice((1, 1, 2, 3))
    calls: list[Call] = []
    count = len(config.units)
    for _ in range(steps):
        if random.random() < rare / 4:
            calls.append(Fault(random.randrange(len(config.ranks)), random.choice(FAULTS)))
        if random.random() < rare / 4:
            calls.append(Death(random.randrange(len(config.ranks)), random.randint(1, 12 * count)))
        for _ in range(accumulation):
            if random.random() < rare:
                calls.append(_between(random, count))
            if random.random() < rare:
                calls.append(Pass(loop.uses, evaluates=True))
            taken = tuple(use for use in loop.uses if not branches or random.random() < 0.8) or loop.uses[:1]
            looks = [(random.randrange(2 * len(taken)), random.randrange(count))] if random.random() < rare else []
            stop = random.randrange(2 * len(taken)) if random.random() < rare / 2 else None
            together = tuple(
                tuple(at for at in range(len(taken)) if not branches or random.random() < 0.8)
                for _ in range(loop.layer_major)
            )
            calls.append(Pass(taken, looks=tuple(looks), stop=stop, micro_batches=together))
        if random.random() < rare:
            calls.append(_between(random, count))
        calls.append(Step(random.choice(loop.norms if rare else loop.norms[:1])))
        if loop.waits_for_updates:
            calls.append(Drain())
    return tuple(calls)


def drawn_saves(random: Random) -> tuple[int, ...]:
    """Sizes of the tensors that a module saves."""
    return tuple(random.randint(1, 3) for _ in range(random.randint(0, 3)))


def interrupted(calls: tuple[Call, ...], random: Random, config: Config) -> tuple[Call, ...]:
    """The calls with interrupts, and with exceptions of the user's within modules."""
    rare = random.choice((0.0, 0.05, 0.2)) / (1 if len(config.ranks) == 1 else 5)
    made: list[Call] = []
    for call in calls:
        if random.random() < rare:
            made.append(Interrupt(random.randrange(len(config.ranks)), random.randint(1, 6 * len(config.units))))
        if isinstance(call, Pass) and call.stop is not None and random.random() < 0.5:
            call = replace(call, inside=True)
        if isinstance(call, Step) and random.random() < rare / 4:
            call = replace(call, raises=True)
        made.append(call)
    return tuple(made)


def recomputing(calls: Iterable[Call], random: Random, *, layer_major: bool) -> tuple[Call, ...]:
    """The calls with checkpoints in each training pass, or without."""
    segment = random.choice((1, 1, 2, 3)) if random.random() < 0.25 else 0
    segment = min(segment, 1) if layer_major else segment
    nested = segment == 1 and random.random() < 0.5
    return tuple(
        replace(call, segment=segment, nested=nested) if isinstance(call, Pass) and not call.evaluates else call
        for call in calls
    )


def _between(random: Random, count: int) -> Call:
    unit = random.randrange(count)
    several = Look(tuple(random.sample(range(count), random.randint(1, min(3, count)))))  # may be too much for a rank
    return random.choice((several, Look((unit,), whole=True), Change(unit), ZeroGrad(), Drain()))
