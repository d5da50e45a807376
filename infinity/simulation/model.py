"""The input of a simulation: a model, its budgets, and the calls of a training loop."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from random import Random

from infinity.simulation.clock import Tempo

SCHEDULES = ("backward", "deferred", "speculative", "barrier")
FAULTS = ("fetch", "write", "update", "spill", "unspill", "states read", "states write")
SAVING_FAULTS = ("activation write", "activation read")


@dataclass(frozen=True)
class UnitSpec:
    """A unit.

    Attributes:
        offloaded: its parameters are fetched and evicted.
        grads: the memory of its gradients: its "own", a "slot", or "shared" bytes; "" if it is frozen.
        on_device: its optimizer states are on the device.
        old_params: where a speculative update keeps the old parameters: "slots", "states", "images" or "" (nowhere).
        is_double_buffered: the drive has two places for each tile of its parameters.
        reversible: number of tiles whose speculative update can be rolled back.
        reconstructs: its gradients can be reconstructed from the optimizer states.
        made: its initial values are created in memory, not on its home.
        streams: its gradients leave the device while computation continues.
        host: its home is host memory, separate from the memory that the model computes in; else a drive.
        on_drive: tiles whose optimizer states are on the drive and pass through the ring.
        parts: gradients are added at each use in a pass; else their sum is added at the last use.
        saves: sizes of the tensors that each forward saves for backward.
        comes: its optimizer states may move to the device after the first step.
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
    on_drive: Collection[int] = ()
    saves: tuple[int, ...] = ()
    comes: bool = False

    @property
    def has_device_shard(self) -> bool:
        """Whether the home of its parameters is on the device, where they can be updated while the unit is evicted."""
        return self.on_device and self.offloaded


@dataclass(frozen=True)
class RankSpec:
    """One process: its memory for parameters, and how long its operations take."""

    capacity: int
    tempo: Tempo = field(default_factory=Tempo)


@dataclass(frozen=True)
class Config:
    """The settings of a training.

    Attributes:
        schedule: when the optimizer runs.
        slots, shared_bytes: memory for gradients of units without memory of their own.
        keeps: each step is committed, and survives a crash.
        images: number of tiles that the undo log can hold.
        ahead_bytes: bytes of units that are gathered ahead, beyond the next one.
        staging_bytes: staging memory; 0 if host and device are one memory.
        ring: slots of the ring of optimizer states.
        gathers: whether units are divided among the ranks, and gathered for each use.
        saved: memory for saved activations, in sizes of tensors; 0 if they stay on the device.
        saved_on_drive: whether activations that do not fit go to a drive.
        device_bytes: device memory for optimizer states that may move, and for the other needs of a step.
        refused: the n-th unit whose states move to the device finds no contiguous memory; 0 for none.
        writes_all: whether each update is written home.
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
        uses: units of each module, in the order of the modules.
        looks: (position, unit) of reads by the user, before this use; positions of backward follow those of forward.
        stop: the user's code raises before this position, or, if `inside`, within its module; None for no exception.
        micro_batches: positions in `uses` of each layer-major micro-batch; empty if the pass is one micro-batch.
        absent: positions that each rank skips, such as experts that its batch does not reach; empty if none does.
        segment: modules between activation checkpoints, whose forward runs again before their backward; 0 for none.
        nested: a module's forward runs again within its backward.
        elements: size of the batch, which determines the need for device memory.
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
        """Return the positions that a rank uses; all positions for rank -1."""
        absent = self.absent[rank] if 0 <= rank < len(self.absent) else ()
        return [position for position in range(len(self.uses)) if position not in absent]

    def again(self, position: int) -> range:
        """Return the positions whose forward runs again before the backward of this one."""
        if not self.segment or (position + 1 < len(self.uses) and (position + 1) % self.segment):
            return range(0)
        return range(position // self.segment * self.segment, position + 1)


@dataclass(frozen=True)
class Step:
    """`engine.step()`. The norm is "quiet", "clipped" or "overflow"; `raises` if the user's scheduler then raises."""

    norm: str = "quiet"
    raises: bool = False


@dataclass(frozen=True)
class Look:
    """The user reads the parameters of units at once; `whole` if all ranks gather them together."""

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
    """All updates are finished, as before a save."""


@dataclass(frozen=True)
class Fault:
    """The next operation of this kind fails on one rank."""

    rank: int
    kind: str


@dataclass(frozen=True)
class Death:
    """The process of one rank dies after this number of ticks."""

    rank: int
    ticks: int


@dataclass(frozen=True)
class Interrupt:
    """The user interrupts the process of one rank after this number of ticks."""

    rank: int
    ticks: int


Call = Pass | Step | Look | Change | ZeroGrad | Drain | Fault | Death | Interrupt


@dataclass(frozen=True)
class Scenario:
    """The settings of a training, and the calls of its loop.

    Attributes:
        seed: seed of the durations of operations.
    """

    config: Config
    calls: tuple[Call, ...]
    seed: int = 0


@dataclass(frozen=True)
class Loop:
    """The part of a training loop that repeats.

    Attributes:
        uses: units of each module, in the order of the modules, in a pass that takes all branches.
        accumulation: micro-batches of a step; None to draw it.
        norms: possible norms of a step, the usual one first, repeated in proportion to their probability.
        rare: probabilities of rare events, of which one is drawn for each scenario.
        waits_for_updates: whether a step ends only when all updates have ended.
        layer_major: number of micro-batches that go through each module together; 0 if they run one by one.
    """

    uses: tuple[tuple[int, ...], ...]
    accumulation: int | None = None
    norms: tuple[str, ...] = ("quiet", "quiet", "quiet", "clipped", "overflow")
    rare: tuple[float, ...] = (0.0, 0.05, 0.2)
    waits_for_updates: bool = False
    layer_major: int = 0


def calls_of(loop: Loop, random: Random, config: Config, steps: int) -> tuple[Call, ...]:
    """Return the calls and faults of `steps` steps. More steps only append calls."""
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
    """Draw the sizes of the tensors that a module saves."""
    return tuple(random.randint(1, 3) for _ in range(random.randint(0, 3)))


def interrupted(calls: tuple[Call, ...], random: Random, config: Config) -> tuple[Call, ...]:
    """Return the calls with drawn interrupts, and with exceptions of the user's code within modules."""
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
    """Return the calls with activation checkpoints in each training pass, or without them, as drawn."""
    segment = random.choice((1, 1, 2, 3)) if random.random() < 0.25 else 0
    segment = min(segment, 1) if layer_major else segment
    nested = segment == 1 and random.random() < 0.5
    return tuple(
        replace(call, segment=segment, nested=nested) if isinstance(call, Pass) and not call.evaluates else call
        for call in calls
    )


def _between(random: Random, count: int) -> Call:
    unit = random.randrange(count)
    several = Look(tuple(random.sample(range(count), random.randint(1, min(3, count)))))  # may not fit into memory
    return random.choice((several, Look((unit,), whole=True), Change(unit), ZeroGrad(), Drain()))
