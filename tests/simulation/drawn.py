"""Models, budgets, ranks and training loops, all of it drawn from one seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from infinity.optim.pipeline import LEAST_SLOTS
from infinity.schedule.needs import STAGING_UNITS
from infinity.simulation.clock import Tempo
from infinity.simulation.filling import need_bytes
from infinity.simulation.model import (
    SAVING_FAULTS,
    SCHEDULES,
    Call,
    Config,
    Death,
    Fault,
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


def draw(seed: int, *, steps: int = 12, deaths: float = 0.0) -> Scenario:
    """The scenario of a seed.

    Args:
        deaths: share of the calls in which a process dies, in scenarios that commit each step; some die anyway.
    """
    random = Random(seed)
    config, loop = _Drawn(random).world()
    others = Random(-2 - seed)
    if not config.shared_bytes and others.random() < 0.15:  # gradients of several units are open at once
        loop = replace(loop, layer_major=others.randint(2, 3))
    config, calls = _varied(config, Random(-1 - seed)), calls_of(loop, random, config, steps)
    config, calls = _saving(config, calls, Random(-3 - seed))
    calls = recomputing(calls, Random(-4 - seed), layer_major=loop.layer_major > 0)
    config, calls = _with_experts(config, calls, Random(-5 - seed))
    config, calls = _filled(config, calls, Random(-7 - seed))
    scenario = Scenario(config, interrupted(calls, Random(-6 - seed), config), seed)
    return _with_deaths(scenario, deaths) if config.keeps and deaths else scenario


def _with_deaths(scenario: Scenario, share: float) -> Scenario:
    config, random = scenario.config, Random(scenario.seed)
    longest = 8 * len(config.units)
    calls: list[Call] = []
    for call in scenario.calls:
        if random.random() < share:
            calls.append(Death(random.randrange(len(config.ranks)), random.randint(1, longest)))
        calls.append(call)
    return replace(scenario, calls=tuple(calls))


def _varied(config: Config, random: Random) -> Config:
    """Where the device has a memory of its own, some units live in the host's; gradients of some come in parts."""
    share = random.choice((0.0, 0.5, 1.0)) if config.staging_bytes and not config.keeps else 0.0
    units = tuple(_with_home(unit, random.random() < share, random.random() < 0.5) for unit in config.units)
    units = tuple(replace(unit, on_drive=range(_stored(unit, random))) for unit in units)
    return replace(config, units=units, ring=random.choice((LEAST_SLOTS, LEAST_SLOTS, 6)))


def _saving(config: Config, calls: tuple[Call, ...], random: Random) -> tuple[Config, tuple[Call, ...]]:
    """Activations of some models are offloaded."""
    if random.random() < 0.8:
        return config, calls
    units = tuple(replace(unit, saves=drawn_saves(random)) for unit in config.units)
    if random.random() < 0.2:
        at = random.randrange(len(calls))
        calls = (*calls[:at], Fault(random.randrange(len(config.ranks)), random.choice(SAVING_FAULTS)), *calls[at:])
    saved = random.choice((3, random.randint(3, 12), 30))
    return replace(config, units=units, saved=saved, saved_on_drive=random.random() < 0.7), calls


def _filled(config: Config, calls: tuple[Call, ...], random: Random) -> tuple[Config, tuple[Call, ...]]:
    """Optimizer states of some models come to the device after the first step."""
    several = len(config.ranks) > 1 and any(unit.offloaded for unit in config.units)
    if several or config.keeps or config.schedule == "speculative" or random.random() < 0.3:
        return config, calls
    units = tuple(_staying(unit, config) if random.random() < 0.6 else unit for unit in config.units)
    units = tuple(replace(unit, comes=_may_come(unit) and random.random() < 0.8) for unit in units)
    most = random.choice((1, 4, 12))
    calls = tuple(replace(call, elements=random.randint(1, most)) if isinstance(call, Pass) else call for call in calls)
    need = max((need_bytes(call) for call in calls if isinstance(call, Pass)), default=0)
    device_bytes = need + random.randint(80, 400)
    return replace(config, units=units, device_bytes=device_bytes, refused=random.choice((0, 0, 1, 2, 3))), calls


def _may_come(unit: UnitSpec) -> bool:
    return bool(unit.grads) and not (unit.offloaded or unit.on_device)


def _staying(unit: UnitSpec, config: Config) -> UnitSpec:
    """The unit, with parameters that never leave memory."""
    old_params = "" if config.keeps else "images"
    return replace(
        unit,
        offloaded=False,
        made=False,
        host=False,
        is_double_buffered=config.keeps,
        old_params=unit.old_params and unit.old_params.replace("slots", old_params),
    )


def _with_experts(config: Config, calls: tuple[Call, ...], random: Random) -> tuple[Config, tuple[Call, ...]]:
    """Parameters of some models stay, so that ranks may use different modules."""
    if len(config.ranks) == 1 or random.random() < 0.75:
        return config, calls
    units = tuple(replace(_staying(unit, config), parts=False) for unit in config.units)
    share = random.choice((0.0, 0.1, 0.5))

    def some(call: Pass) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(at for at in range(len(call.uses)) if random.random() < share) for _ in range(len(config.ranks))
        )

    calls = tuple(
        replace(call, absent=some(call), stop=None) if isinstance(call, Pass) and not call.micro_batches else call
        for call in calls
    )
    return replace(config, units=units), calls


def _stored(unit: UnitSpec, random: Random) -> int:
    """Where states tell old values, all of them are on the drive."""
    all_stored = unit.old_params == "states" or random.random() < 0.3
    return 0 if unit.on_device or not unit.grads else unit.tiles if all_stored else random.randint(0, unit.tiles)


def _with_home(unit: UnitSpec, host: bool, parts: bool) -> UnitSpec:
    unit = replace(unit, parts=parts)
    if not host or unit.on_device or not unit.offloaded:
        return unit
    old_params = "images" if unit.old_params == "slots" else unit.old_params
    return replace(unit, host=True, is_double_buffered=False, old_params=old_params)


class _Drawn:
    """Draws a config and its loop."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def world(self) -> tuple[Config, Loop]:
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
            least = max(sum(units[unit].nbytes for unit in set(use) if units[unit].offloaded) for use in uses)
            least = max([least, *(unit.nbytes for unit in units if unit.offloaded)])
        spare = random.choice((0, 0, random.randint(0, 9), sum(unit.nbytes for unit in units)))
        count = 1 if alone else random.choice((2, 3, random.randint(2, 8)))
        ranks = tuple(
            RankSpec(least + spare + random.choice((0, random.randint(0, 9))), Tempo.drawn(random))
            for _ in range(count)
        )
        shared = [unit.grad_bytes for unit in units if unit.grads == "shared"]
        several = [unit for unit in range(len(units)) if sum(unit in use for use in uses) > 1]
        open_bytes = sum(units[unit].grad_bytes for unit in several)
        shared_bytes = open_bytes + sum(sorted(shared)[-2:]) + random.choice((0, 0, 3)) if shared else 0
        images = random.randint(0, 4)
        ahead_bytes = random.choice((0, 0, random.randint(1, 20)))
        largest = max((unit.nbytes for unit in units if not unit.on_device), default=0)
        staging_bytes = STAGING_UNITS * largest if streams or random.random() < 0.2 else 0
        config = Config(units, ranks, schedule, slots, shared_bytes, keeps, images, ahead_bytes, staging_bytes)
        return config, Loop(tuple(uses), accumulation=1 if shared_bytes else None)

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
            offloaded=moves,
            grads=grads,
            grad_bytes=random.randint(1, 5),
            on_device=on_device,
            old_params=old_params,
            is_double_buffered=keeps or (old_params == "slots"),
            reversible=random.choice((tiles, random.randint(1, tiles))),
            reconstructs=random.random() < 0.5,
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


def least_bytes(units: tuple[UnitSpec, ...], use: tuple[int, ...]) -> int:
    """What a use needs: its units, and the largest of the others, which comes next or is updated meanwhile."""
    moving = {index: unit.nbytes for index, unit in enumerate(units) if unit.offloaded}
    others = [nbytes for index, nbytes in moving.items() if index not in use]
    return sum(moving.get(unit, 0) for unit in use) + max(others, default=0)
