"""Translates a training plan into a simulation, and lists how the simulation differs from the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from infinity.config import Config as Configuration
from infinity.errors import ConfigError
from infinity.optim.pipeline import LEAST_SLOTS
from infinity.planner.training_plan import TrainingPlan
from infinity.simulation.clock import Tempo
from infinity.simulation.filling import device_bytes_of
from infinity.simulation.model import (
    Config,
    Loop,
    Pass,
    RankSpec,
    Scenario,
    UnitSpec,
    calls_of,
    drawn_saves,
    interrupted,
    recomputing,
)
from infinity.simulation.run import Outcome, search
from infinity.tiers import Memory
from infinity.zero.updates import UpdateSchedule

_MOST_TILES = 4  # simulated tiles of a unit
_MOST_RANKS = 8
_SAVED = 8  # memory for saved activations, in units of the smallest tensor
SCENARIO_STEPS = 12


@dataclass(frozen=True)
class Planned:
    """The simulation of a training.

    Attributes:
        config: its operations take no time; each scenario draws other durations.
        notes: differences between the simulation and the engine, in words.
    """

    config: Config
    loop: Loop
    notes: tuple[str, ...]

    def scenario(self, seed: int, steps: int = SCENARIO_STEPS) -> Scenario:
        """Return a scenario of so many steps, with durations, failures and user calls drawn from a seed."""
        random, saves = Random(seed), Random(-3 - seed)
        made = random.random() < 0.5
        units = tuple(replace(unit, made=made and _may_be_made(unit)) for unit in self.config.units)
        if self.config.saved:
            units = tuple(replace(unit, saves=drawn_saves(saves)) for unit in units)
        ranks = tuple(replace(rank, tempo=Tempo.drawn(random)) for rank in self.config.ranks)
        config = replace(self.config, ranks=ranks, units=units)
        calls = calls_of(self.loop, random, config, steps)
        calls = recomputing(calls, Random(-4 - seed), layer_major=self.loop.layer_major > 0)
        return Scenario(config, interrupted(calls, Random(-6 - seed), config), seed)


def _may_be_made(unit: UnitSpec) -> bool:
    return unit.offloaded and not unit.on_device and not unit.host


def search_planned(planned: Planned, steps: int, first: int = 0) -> tuple[Outcome, int]:
    """Simulate so many steps, seed after seed, until a violation; see `search`."""
    ranks = len(planned.config.ranks)

    def scenario_of(seed: int, total: Outcome) -> Scenario | None:
        left = steps - total.steps // ranks
        return planned.scenario(seed, min(SCENARIO_STEPS, left)) if left > 0 else None

    return search(scenario_of, first)


def planned_of(plan: TrainingPlan, config: Configuration, later: Collection[int] = ()) -> Planned:
    """Return the simulation of a plan.

    Args:
        later: units whose optimizer states move to the device after the first step.

    Raises:
        ConfigError: the plan has units that cannot be simulated.
    """
    tiles = plan.placement.tiles
    units = tuple(replace(_unit(plan, unit, tiles[unit]), comes=unit in later) for unit in range(len(plan.units)))
    uses = tuple(point.units for point in plan.sizing.partition.hook_points if point.units)
    sizing, rules, homes = plan.sizing, plan.sizing.rules, plan.placement.grad_homes
    gathers = rules.sharding.count > 1
    ranks = min(rules.sharding.count if gathers else plan.machine.ranks, _MOST_RANKS)
    own_bytes = sum(sizing.shards.grad_sizes[unit] for unit in homes.own)
    simulated = Config(
        units,
        (RankSpec(plan.params_bytes),) * ranks,
        sizing.schedule.value,
        slots=homes.slots,
        shared_bytes=0 if homes.spilled else max(0, plan.split.grads_bytes - own_bytes),
        keeps=sizing.keeps_steps,
        images=_images(plan, sum(unit.tiles for unit in units if unit.grads)),
        ahead_bytes=sizing.ahead_bytes,
        # The engine stages shards, the simulation whole units.
        staging_bytes=0 if rules.update_memory is Memory.DEVICE else sizing.params.staging * rules.sharding.count,
        gathers=gathers,
        ring=LEAST_SLOTS,
        saved=_SAVED if rules.activations_bytes else 0,
        saved_on_drive=config.tiering.activations == "nvme",
        device_bytes=device_bytes_of(units, Pass(uses)) if later else 0,
    )
    loop = Loop(
        uses,
        accumulation=config.gradient_accumulation_steps,
        layer_major=config.gradient_accumulation_steps if sizing.layer_major else 0,
        norms=_norms(config),
        rare=(0.05, 0.2, 0.4),
        waits_for_updates=rules.waits_for_updates,
    )
    most_tiles = max((len(homes) for homes in tiles), default=0)
    return Planned(simulated, loop, tuple(_notes(plan, config, ranks, most_tiles)))


# Units #


def _unit(plan: TrainingPlan, unit: int, homes: Sequence[Memory]) -> UnitSpec:
    sizing, spec, home = plan.sizing, plan.sizing.specs[unit], plan.placement.params[unit]
    there, trained, moves = unit in sizing.on_device, bool(homes), spec.offloaded
    if moves and there is not spec.has_device_shard:
        raise ConfigError(
            f"unit `{spec.name}` cannot be simulated: its parameters are fetched and evicted, and its states are "
            f"{'' if there else 'not '}on the device, but its shard is {'not' if there else 'there'}"
        )
    host = home is Memory.HOST and moves and not sizing.keeps_steps
    tiles = max(1, min(_MOST_TILES, len(homes)))
    is_double_buffered = sizing.keeps_steps or (sizing.is_double_buffered and home is Memory.NVME)
    stored = sum(home is Memory.NVME for home in homes)
    old_params = ""
    if trained and not there and sizing.schedule is UpdateSchedule.SPECULATIVE:
        old_params = _old_params(plan, is_double_buffered=is_double_buffered and moves, all_stored=stored == len(homes))
    on_drive = range(-(-stored * tiles // max(1, len(homes))))
    reversible = (len(on_drive) if old_params in ("slots", "states") else 0) or tiles
    return UnitSpec(
        nbytes=spec.nbytes,
        tiles=tiles,
        offloaded=moves,
        grads=_grads(plan, unit, there=there) if trained else "",
        grad_bytes=sizing.shards.grad_sizes[unit],
        on_device=there,
        old_params=old_params,
        is_double_buffered=is_double_buffered,
        reversible=reversible,
        reconstructs=sizing.rules.grads.reconstructs and reversible == tiles,
        streams=sizing.rules.grads.stream and not there,
        host=host,
        parts=unit in sizing.shards.standing,
        on_drive=on_drive,
    )


def _grads(plan: TrainingPlan, unit: int, *, there: bool) -> str:
    homes = plan.placement.grad_homes
    return "own" if there or unit in homes.own else "slot" if unit in homes.spilled else "shared"


def _old_params(plan: TrainingPlan, *, is_double_buffered: bool, all_stored: bool) -> str:
    """Return where a speculative update keeps the old parameters. The engine decides this at the time of the update."""
    sizing = plan.sizing
    if not sizing.keeps_steps and sizing.is_double_buffered and not sizing.writes_updates and all_stored:
        return "states"
    return "slots" if is_double_buffered else "" if sizing.keeps_steps else "images"


def _images(plan: TrainingPlan, tiles: int) -> int:
    """Return how many tiles fit into the undo log, of the tiles of all units."""
    needs, split = plan.needs, plan.split
    return split.images_bytes * tiles // needs.images_bytes if needs.images_bytes else 0


def _norms(config: Configuration) -> tuple[str, ...]:
    clipped = ("clipped",) if config.gradient_clipping > 0 else ()
    return ("quiet", "quiet", "quiet", *clipped, "overflow")


# Differences from the engine #


def _notes(plan: TrainingPlan, config: Configuration, ranks: int, most_tiles: int) -> Iterator[str]:
    sizing, rules = plan.sizing, plan.sizing.rules
    points = [point.module_name for point in sizing.partition.hook_points if point.units]
    around = [name for name in points if any(other.startswith(f"{name}.") for other in points)]
    in_memory = plan.placement.params.count(Memory.HOST)
    micro = config.gradient_accumulation_steps
    if any(Memory.NVME in homes for homes in plan.placement.tiles):
        yield f"the ring of optimizer states has {LEAST_SLOTS} slots, the minimum of the engine"
    if most_tiles > _MOST_TILES:
        yield f"a unit has {_MOST_TILES} tiles at most, instead of up to {most_tiles}"
    if ranks < plan.machine.ranks:
        yield f"{ranks} ranks of {plan.machine.ranks} are simulated"
    if rules.grads.reduces:
        yield "gradients are not exchanged between ranks, and a rank that fails ends all others between two calls"
    if rules.activations_bytes:
        yield "sizes of saved activations are drawn, relative to the memory for them"
    if sizing.layer_major:
        yield "layer-major accumulation: each module that uses a unit is simulated as a block"
    if micro > 1 and (rules.grads.sums_on_device or rules.grads.sums_once):
        yield "gradients leave the device after each micro-batch, instead of being summed on it"
    if sizing.on_device:
        yield "memory for gradients on the device is assumed to be enough"
    if around:
        yield f"modules that contain others ({', '.join(around)}) are used before these, not during their use"
    if sizing.shards.standing:
        yield "small parameters that are never evicted get a gradient at each use of one of them"
    if sizing.keeps_steps and in_memory and rules.update_memory is Memory.HOST:
        yield f"{in_memory} units whose home is host memory are simulated as if it were the drives"
    if rules.params.pass_host:
        yield "reads from the drives to the device are simulated as reads through host memory"
