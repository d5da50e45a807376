"""Cuts a scenario that breaks a promise to one that cannot be made shorter without keeping it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from infinity.simulation import clock, model
from infinity.simulation.clock import Tempo
from infinity.simulation.model import Call, Change, Death, Fault, Interrupt, Look, Pass, RankSpec, Scenario, UnitSpec
from infinity.simulation.run import Outcome, simulate

Run = Callable[[Scenario], Outcome]
_SEEDS = 3  # what is left out changes how long everything else takes: a few other times are tried


def shrink(scenario: Scenario, most_s: float = 30.0, run: Run = simulate) -> Scenario:
    """The shortest scenario found that breaks the same promise; the same one if it breaks none."""
    violation = run(scenario).violation
    end_s = time.monotonic() + most_s

    def breaks(each: Scenario) -> bool:
        found = run(each).violation
        return found is not None and violation is not None and found.promise == violation.promise

    smaller: Scenario | None = scenario
    while violation is not None and smaller is not None:
        scenario = smaller
        smaller = next((each for each in _tries(scenario, end_s) if breaks(each)), None)
    return scenario


def _tries(scenario: Scenario, end_s: float) -> Iterator[Scenario]:
    for smaller in _smaller(scenario):
        for seed in range(scenario.seed, scenario.seed + _SEEDS):
            if time.monotonic() > end_s:
                return
            yield replace(smaller, seed=seed)


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with something left out, the most first."""
    calls, config = scenario.calls, scenario.config
    for rest in _without_parts(calls):
        yield replace(scenario, calls=rest)
    for index in range(len(config.ranks) if len(config.ranks) > 1 else 0):
        yield _without_rank(scenario, index)
    for unit in range(len(config.units) if len(config.units) > 1 else 0):
        yield _without_unit(scenario, unit)
    for index, call in enumerate(calls):
        for simpler in _simpler(call):
            yield replace(scenario, calls=(*calls[:index], simpler, *calls[index + 1 :]))
    for ranks in _simpler_ranks(config.ranks):
        yield replace(scenario, config=replace(config, ranks=ranks))
    plain = replace(config, keeps=False), replace(config, images=0), replace(config, ahead_bytes=0)
    for simpler_config in (*plain, replace(config, staging_bytes=0)):
        if simpler_config != config:
            yield replace(scenario, config=simpler_config)
    for unit, spec in enumerate(config.units):
        for simpler_unit in _simpler_unit(spec):
            units = (*config.units[:unit], simpler_unit, *config.units[unit + 1 :])
            yield replace(scenario, config=replace(config, units=units))


def _without_parts(calls: tuple[Call, ...]) -> Iterator[tuple[Call, ...]]:
    """Leave out halves, quarters, ... and single calls."""
    size = len(calls) // 2
    while size:
        for start in range(0, len(calls), size):
            yield calls[:start] + calls[start + size :]
        size //= 2


def _without_rank(scenario: Scenario, index: int) -> Scenario:
    ranks = scenario.config.ranks[:index] + scenario.config.ranks[index + 1 :]
    calls = tuple(
        replace(call, rank=call.rank - (call.rank > index)) if isinstance(call, (Fault, Death, Interrupt)) else call
        for call in scenario.calls
        if not (isinstance(call, (Fault, Death, Interrupt)) and call.rank == index)
    )
    return replace(scenario, config=replace(scenario.config, ranks=ranks), calls=calls)


def _without_unit(scenario: Scenario, unit: int) -> Scenario:
    """Leave a unit out of the model; those behind it are called one less."""

    def others(units: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(other - (other > unit) for other in units if other != unit)

    calls: list[Call] = []
    for call in scenario.calls:
        match call:
            case Pass(uses=uses, looks=looks):
                left = tuple(use for use in map(others, uses) if use)
                looks = tuple((at, other - (other > unit)) for at, other in looks if other != unit)
                calls += [replace(call, uses=left, looks=looks)] if left else []
            case Look(units=units):
                calls += [replace(call, units=others(units))] if others(units) else []
            case Change(unit=other):
                calls += [Change(other - (other > unit))] if other != unit else []
            case _:
                calls.append(call)
    left_units = scenario.config.units[:unit] + scenario.config.units[unit + 1 :]
    return replace(scenario, config=replace(scenario.config, units=left_units), calls=tuple(calls))


def _simpler(call: Call) -> Iterator[Call]:
    match call:
        case Pass(uses=uses, looks=looks, stop=stop, micro_batches=micro_batches):
            if micro_batches:
                yield replace(call, micro_batches=())
                yield replace(call, micro_batches=micro_batches[1:])
            if looks:
                yield replace(call, looks=())
            if call.absent:
                yield replace(call, absent=())
            if call.segment:
                yield replace(call, segment=0, nested=False)
            if call.inside:
                yield replace(call, inside=False)
            if stop is not None:
                yield replace(call, stop=None)
            for index in range(len(uses) if len(uses) > 1 else 0):
                yield replace(call, uses=uses[:index] + uses[index + 1 :])
        case Look(units=(_, _, *_) as units):
            yield replace(call, units=units[1:])
        case _:
            return


def _simpler_ranks(ranks: tuple[RankSpec, ...]) -> Iterator[tuple[RankSpec, ...]]:
    for tempo in (Tempo(), Tempo(0.0, 10**6), Tempo(0.3, 20)):
        if any(rank.tempo != tempo for rank in ranks) and ranks[0].tempo not in (Tempo(), Tempo(0.0, 10**6)):
            yield tuple(replace(rank, tempo=tempo) for rank in ranks)


def _simpler_unit(spec: UnitSpec) -> Iterator[UnitSpec]:
    plain = UnitSpec(1)
    for name in (each.name for each in fields(spec) if each.name != "reversible"):  # which follows the tiles
        if getattr(spec, name) != getattr(plain, name):
            changed = replace(spec, **{name: getattr(plain, name)})
            yield replace(changed, reversible=min(changed.reversible, changed.tiles))


def parse(told: str) -> Scenario:
    """The scenario of a `text`."""
    scenario = eval(told, {name: each for module in (clock, model) for name, each in vars(module).items()})
    assert isinstance(scenario, Scenario)
    return scenario


def text(scenario: Scenario) -> str:
    """The scenario in words that can be given to `--replay`."""
    config = scenario.config
    lines = [*(f"        {unit}," for unit in config.units)]
    rest = ", ".join(f"{each.name}={getattr(config, each.name)!r}" for each in fields(config) if each.name != "units")
    calls = [f"    {call}," for call in scenario.calls]
    return "\n".join(
        ["Scenario(", "  Config((", *lines, f"    ), {rest}),", "  (", *calls, "  ),", f"  {scenario.seed},", ")"]
    )
