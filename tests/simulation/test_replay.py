"""What the simulation does in a scenario is what the engine does in it, decision by decision."""

from __future__ import annotations

import pytest

from infinity.simulation.clock import Tempo
from infinity.simulation.model import Config, Pass, RankSpec, Scenario, Step, UnitSpec
from infinity.simulation.run import simulate
from tests.simulation.drawn import draw
from tests.simulation.mutants import planted
from tests.simulation.replay import expressed, in_one_thread, on_engine, simulated
from tests.simulation.shrink import parse, shrink, text

# Of each schedule: operations that end at once, and such that end late.
SEEDS = {
    "backward": (2, 14, 31, 284),
    "deferred": (1, 3, 22, 26),
    "speculative": (7, 35, 173),
    "barrier": (0, 24, 41),
}
CASES = [(schedule, seed) for schedule, seeds in SEEDS.items() for seed in seeds]


@pytest.mark.parametrize(("schedule", "seed"), CASES)
@pytest.mark.filterwarnings("ignore:.*not finite.*")
def test_the_engine_decides_as_the_simulation_does(schedule: str, seed: int) -> None:
    scenario, _ = expressed(draw(seed, steps=5))
    assert scenario.config.schedule == schedule
    here, there = simulated(scenario), on_engine(scenario)
    assert (here.error, there.error) == ("", "")
    assert here.decisions == there.decisions
    assert len(here.decisions) > 20


@pytest.mark.parametrize("name", ["update_left_out", "submitted_twice", "room_by_pinned", "fetch_left_out"])
def test_a_planted_fault_that_is_shrunk_is_seen_in_both(name: str) -> None:
    with planted(name):
        found = next(seed for seed in range(200) if simulated(expressed(draw(seed, steps=5))[0]).error)
        scenario, _ = expressed(draw(found, steps=5))
        short, _ = expressed(parse(text(shrink(scenario, 1.0, in_one_thread))))
        assert simulated(short).error
        assert on_engine(short).error
    assert (simulated(short).error, on_engine(short).error) == ("", "")


def test_what_cannot_be_expressed_is_named() -> None:
    unit = UnitSpec(4, grads="shared", on_device=True)
    config = Config((unit, unit), (RankSpec(9, Tempo(0.3, 20)), RankSpec(9)), "backward", keeps=True, staging_bytes=12)
    scenario, left_out = expressed(Scenario(config, (Pass(((0, 1), (1,)), stop=1), Step())))
    assert left_out == [
        "other ranks than the first",
        "an order that is drawn: operations end when they are looked at",
        "states on the device",
        "steps that stay on the drives",
        "gradients in shared memory",
        "exceptions within a pass",
        "modules with parameters of several units",
    ]
    assert expressed(scenario) == (scenario, [])
    assert simulate(scenario).violation is None
