"""What is simulated: a model, its budgets, and what a training loop calls; all of it drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from infinity.simulation.clock import Tempo

SCHEDULES = ("backward", "deferred", "speculative", "barrier")
STAGING_UNITS = 3  # as in infinity/schedule/placement.py
FAULTS = ("fetch", "write", "update", "spill", "unspill")


@dataclass(frozen=True)
class UnitSpec:
    """A unit.

    Attributes:
        moves: it comes and goes.
        grads: where its gradients have memory: "own", a "slot", or "shared" bytes; "" if it is frozen.
        on_device: its optimizer states are where the model computes.
        old_params: where a speculative update keeps what it replaces: "slots", "states", "images" or "" (nowhere).
        has_slots: the drive has two of each tile.
        ahead: tiles that a speculative update can undo.
        recovers: its gradients can be recovered from the optimizer states.
        made: its first values are made in memory.
        streams: its gradients leave the device while that computes on.
    """

    nbytes: int
    tiles: int = 1
    moves: bool = True
    grads: str = "own"
    grad_bytes: int = 1
    on_device: bool = False
    old_params: str = ""
    has_slots: bool = False
    ahead: int = 1
    recovers: bool = False
    made: bool = False
    streams: bool = False

    @property
    def beside(self) -> bool:
        """The values that come and go have their home on the device, too, and may be updated there at any time."""
        return self.on_device and self.moves


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
        images: tiles of before-images that there is room for.
        ahead_bytes: of units that are gathered ahead, beyond the next one.
        staging_bytes: host memory that units pass through where the device has a memory of its own; 0 if it has none.
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


@dataclass(frozen=True)
class Pass:
    """A micro-batch, forward and backward, or an evaluation.

    Attributes:
        uses: units that a module computes on together, module by module.
        looks: at a unit, before the use at this position; backward's uses follow forward's.
        stop: before this position the user's code raises.
    """

    uses: tuple[tuple[int, ...], ...]
    evaluates: bool = False
    looks: tuple[tuple[int, int], ...] = ()
    stop: int | None = None


@dataclass(frozen=True)
class Step:
    """`engine.step()`: the gradients' norm is "quiet", "clipped" or "overflow"."""

    norm: str = "quiet"


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


Call = Pass | Step | Look | Change | ZeroGrad | Drain | Fault | Death


@dataclass(frozen=True)
class Scenario:
    """A world and what happens in it.

    Attributes:
        seed: of how long each operation takes.
    """

    config: Config
    calls: tuple[Call, ...]
    seed: int = 0


def draw(seed: int, *, steps: int = 12) -> Scenario:
    """The scenario of a seed."""
    random = Random(seed)
    config, uses = _Drawn(random).config()
    return Scenario(config, tuple(_calls(random, config, uses, steps)), seed)


class _Drawn:
    """Draws a config; `chance` is the probability of what is rare."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def config(self) -> tuple[Config, list[tuple[int, ...]]]:
        random = self.random
        schedule = random.choice(SCHEDULES)
        keeps = random.random() < 0.25
        memory = random.choice(("own", "slot", "slot", "shared" if schedule == "backward" else "slot"))
        slots = random.randint(1, 4) if memory == "slot" else 0
        streams = random.random() < 0.3
        count = random.randint(1, 10)
        units = tuple(self._unit(schedule, memory, keeps=keeps, streams=streams) for _ in range(count))
        if random.random() < 0.3:  # as blocks are
            units = tuple(replace(unit, nbytes=units[0].nbytes) for unit in units)
        uses = self._uses(units)
        least = max(least_bytes(units, use) for use in uses)
        alone = random.random() < 0.5
        if alone and random.random() < 0.3:  # what is used together, and no unit beside it
            least = max(sum(units[unit].nbytes for unit in set(use) if units[unit].moves) for use in uses)
            least = max([least, *(unit.nbytes for unit in units if unit.moves)])
        spare = random.choice((0, 0, random.randint(0, 9), sum(unit.nbytes for unit in units)))
        count = 1 if alone else random.choice((2, 3, random.randint(2, 8)))
        ranks = tuple(
            RankSpec(least + spare + random.choice((0, random.randint(0, 9))), self._tempo()) for _ in range(count)
        )
        shared = [unit.grad_bytes for unit in units if unit.grads == "shared"]
        several = [unit for unit in range(len(units)) if sum(unit in use for use in uses) > 1]
        open_bytes = sum(units[unit].grad_bytes for unit in several)
        shared_bytes = open_bytes + sum(sorted(shared)[-2:]) + random.choice((0, 0, 3)) if shared else 0
        images = random.randint(0, 4)
        ahead_bytes = random.choice((0, 0, random.randint(1, 20)))
        largest = max((unit.nbytes for unit in units if unit.moves), default=0)
        staging_bytes = STAGING_UNITS * largest if streams or random.random() < 0.2 else 0
        return Config(units, ranks, schedule, slots, shared_bytes, keeps, images, ahead_bytes, staging_bytes), uses

    def _unit(self, schedule: str, memory: str, *, keeps: bool, streams: bool) -> UnitSpec:
        random = self.random
        moves, frozen = random.random() < 0.85, random.random() < 0.1
        tiles = random.randint(1, 3)
        on_device = not (frozen or keeps) and random.random() < 0.08
        grads = "" if frozen else "own" if on_device or random.random() < 0.25 else memory
        old_params = ""
        if schedule == "speculative" and grads and not on_device:
            told = ["slots", "states"] if moves else ["images", "states"]
            if keeps:  # else a crash would find neither what was before nor what is then
                told = ["slots"] if moves else []
            old_params = random.choice([*told, *told, ""])
        return UnitSpec(
            nbytes=random.choice((1, random.randint(1, 9), random.randint(1, 30))),
            tiles=tiles,
            moves=moves,
            grads=grads,
            grad_bytes=random.randint(1, 5),
            on_device=on_device,
            old_params=old_params,
            has_slots=keeps or (old_params == "slots"),
            ahead=random.choice((tiles, random.randint(1, tiles))),
            recovers=random.random() < 0.5,
            made=moves and not on_device and random.random() < 0.2,
            streams=streams and not on_device,
        )

    def _uses(self, units: tuple[UnitSpec, ...]) -> list[tuple[int, ...]]:
        """What a pass uses that goes through all branches."""
        random, count = self.random, len(units)
        order = list(range(count)) if random.random() < 0.7 else random.sample(range(count), random.randint(1, count))
        uses: list[tuple[int, ...]] = [(unit,) for unit in order]
        if random.random() < 0.4:  # one unit is used twice, as tied weights are
            uses.insert(random.randint(0, len(uses)), (random.choice(order),))
        if count > 1 and random.random() < 0.3:  # a module has parameters in two units
            at = random.randrange(len(uses))
            uses[at] = (uses[at][0], random.choice([unit for unit in range(count) if unit != uses[at][0]]))
        return uses

    def _tempo(self) -> Tempo:
        random = self.random
        longest = random.choice((0, 3, 20, 200, 10**6))
        return Tempo(random.choice((0.0, 0.3, 0.9)), longest, random.choice((1, 1, 16)))


def least_bytes(units: tuple[UnitSpec, ...], use: tuple[int, ...]) -> int:
    """What a use needs: its units, and the largest of the others, which comes next or is updated meanwhile."""
    moving = {index: unit.nbytes for index, unit in enumerate(units) if unit.moves}
    others = [nbytes for index, nbytes in moving.items() if index not in use]
    return sum(moving.get(unit, 0) for unit in use) + max(others, default=0)


def _calls(random: Random, config: Config, uses: list[tuple[int, ...]], steps: int) -> list[Call]:
    """What a training loop calls in so many steps."""
    rare = random.choice((0.0, 0.05, 0.2))
    branches = random.random() < 0.3
    accumulation = random.choice((1, 1, 2, 3)) if not config.shared_bytes else 1
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
                calls.append(Pass(tuple(uses), evaluates=True))
            taken = [use for use in uses if not branches or random.random() < 0.8] or uses[:1]
            looks = [(random.randrange(2 * len(taken)), random.randrange(count))] if random.random() < rare else []
            stop = random.randrange(2 * len(taken)) if random.random() < rare / 2 else None
            calls.append(Pass(tuple(taken), looks=tuple(looks), stop=stop))
        if random.random() < rare:
            calls.append(_between(random, count))
        norms = ("quiet", "quiet", "quiet", "clipped", "overflow") if rare else ("quiet",)
        calls.append(Step(random.choice(norms)))
    return calls


def _between(random: Random, count: int) -> Call:
    unit = random.randrange(count)
    several = Look(tuple(random.sample(range(count), random.randint(1, min(3, count)))))  # may be too much for a rank
    return random.choice((several, Look((unit,), whole=True), Change(unit), ZeroGrad(), Drain()))
