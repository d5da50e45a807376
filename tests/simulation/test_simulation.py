"""The scheduler keeps its promises under hostile orders, and the simulation would notice if it did not."""

from __future__ import annotations

import time

import pytest

from infinity.simulation.clock import Tempo
from infinity.simulation.model import Config, Death, Fault, Pass, RankSpec, Scenario, Step, UnitSpec
from infinity.simulation.run import search, simulate, with_last
from tests.simulation.drawn import draw
from tests.simulation.mutants import MUTANTS, find, planted
from tests.simulation.shrink import parse, shrink, text

_SEARCH_S = 12.0  # a run of the tests takes seeds that no run before has taken
_MUTANT_S = 60.0


def test_new_seeds_break_no_promise() -> None:
    end_s = time.monotonic() + _SEARCH_S
    total, end = search(lambda seed, _: draw(seed) if time.monotonic() < end_s else None, time.time_ns() // 1_000_000)
    assert total.violation is None, f"python -m tests.simulation {end - 1} shows and shrinks it: {total.violation}"


_FOUND = (10_000_209,)  # the worker chooses a speculative update while another one is withdrawn


@pytest.mark.parametrize("seed", [*range(40), *_FOUND])
def test_fixed_seeds_break_no_promise(seed: int) -> None:
    assert simulate(draw(seed)).violation is None


def test_an_interrupt_before_stale_copies_are_dropped_stops_the_engine() -> None:
    assert simulate(draw(1795857430249, steps=60, deaths=0.5)).violation is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    assert find(name, _MUTANT_S) is not None, MUTANTS[name].why


def test_a_planted_fault_is_gone_afterwards() -> None:
    with planted("update_left_out"):
        assert simulate(draw(0)).violation is not None
    assert simulate(draw(0)).violation is None


def test_a_seed_is_the_same_every_time() -> None:
    traces: list[list[str]] = [[], []]
    for trace in traces:
        simulate(draw(3), trace.append)
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


def test_a_violation_shrinks_to_a_scenario_that_can_be_replayed() -> None:
    with planted("plan_evicts_pinned"):
        scenario, found = next(
            (scenario, violation)
            for scenario in map(draw, range(200))
            if (violation := simulate(scenario).violation) is not None
        )
        short = shrink(scenario, most_s=1.5)
        replayed = simulate(parse(text(short))).violation
        assert replayed is not None
        assert replayed.promise == found.promise
    assert len(short.calls) < len(scenario.calls) // 2
    assert simulate(short).violation is None


def test_a_committed_step_survives_a_death_at_every_moment() -> None:
    unit = UnitSpec(4, tiles=2, is_double_buffered=True)
    config = Config((unit, unit, unit), (RankSpec(8, Tempo(0.2, 9)),), "deferred", keeps=True)
    step = (Pass(((0,), (1,), (2,))), Step())
    for ticks in range(1, 110):
        outcome = simulate(Scenario(config, (*step, *step, Death(0, ticks), *step, *step, *step, *step), seed=ticks))
        assert outcome.violation is None
        assert outcome.crashes == 1


def test_a_failed_prefetch_that_nobody_waits_for_loses_nothing() -> None:
    units = (UnitSpec(6), UnitSpec(28), UnitSpec(13))
    calls = (Pass(((0,), (1,), (2,))), Fault(0, "fetch"), Pass(((0,), (1,))))
    assert simulate(Scenario(Config(units, (RankSpec(46),), "backward"), calls)).violation is None


def test_an_update_that_was_decided_on_before_it_ran_leaves_nothing_to_undo() -> None:
    config = Config(
        (UnitSpec(1, tiles=3, reversible=2, old_params="images"),),
        (RankSpec(15, Tempo(0.0, 10**6)),),
        "speculative",
        images=2,
        ring=6,
    )
    one = Pass(((0,),))
    scenario = Scenario(config, (Step(), one, Step(), one, Step("clipped")), seed=1795843332005)
    assert simulate(scenario).violation is None


def test_a_tile_whose_write_has_failed_is_not_read_ahead() -> None:
    unit = UnitSpec(1, offloaded=False, on_drive=(0,))
    config = Config((unit,), (RankSpec(0, Tempo(0.0, 10**6)),), "backward", ring=4)
    one = Pass(((0,),))
    scenario = Scenario(config, (Fault(0, "states write"), one, Step(), one, Step()), seed=100151)
    assert simulate(scenario).violation is None


def test_the_last_pass_of_a_step_is_told_from_the_others() -> None:
    one, evaluation, step = Pass(((0,),)), Pass(((0,),), evaluates=True), Step()
    calls = (one, one, evaluation, step, one)
    assert [last for _, last in with_last(calls)] == [False, True, False, False, False]
