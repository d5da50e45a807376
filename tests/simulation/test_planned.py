"""What is simulated of a configuration is what the engine lays out, and no promise is broken in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.config import load_config
from infinity.errors import ConfigError
from infinity.planner import TrainingPlan
from infinity.planner.planned import Planned, planned_of, search_planned
from infinity.simulation.model import Pass
from tests.action_logs import test_planner
from tests.action_logs.cases import CASES, LARGE, ON_DEVICE, Case, config_of
from tests.simulation.mutants import planted

_KEPT = {"crash_consistent": True}
MORE = {
    "kept_and_staying": Case("none", "nvme", stage=1, schedule="speculative", clip=1.0, tiering=_KEPT),
    "kept_in_host_memory": Case("cpu", "nvme", schedule="deferred", clip=1.0, device="discrete", tiering=_KEPT),
    "ahead_in_host_memory": Case("cpu", "cpu", schedule="speculative", clip=1.0, device="discrete"),
    "ahead_in_slots": Case(room=0.2, schedule="speculative", clip=1.0, bf16=True, device="discrete"),
    "four_ranks": Case(room=0.2, ranks=4, schedule="speculative", clip=1.0),
    "four_ranks_stage_1": Case("none", "nvme", stage=1, ranks=4),
}
ALL = CASES | ON_DEVICE | MORE
STEPS = 24


def planned(case: Case, path: Path) -> tuple[TrainingPlan, Planned]:
    plan, config = test_planner.planned(case, path)
    return plan, planned_of(plan, config)


@pytest.mark.parametrize("name", ALL)
def test_no_promise_is_broken_in(name: str, tmp_path: Path) -> None:
    plan, simulated = planned(ALL[name], tmp_path)
    config = simulated.config
    assert config.schedule == plan.sizing.schedule.value
    assert len(config.ranks) == ALL[name].ranks
    assert [unit.nbytes for unit in config.units] == [unit.nbytes for unit in plan.units]
    assert [unit.offloaded for unit in config.units] == [unit.offloaded for unit in plan.units]
    outcome, _ = search_planned(simulated, STEPS, first=1)
    assert outcome.violation is None
    assert outcome.steps == STEPS * ALL[name].ranks


def test_budgets_are_those_of_the_plan(tmp_path: Path) -> None:
    plan, simulated = planned(ALL["tightest_sums_deferred"], tmp_path)
    config, loop = simulated.config, simulated.loop
    assert [rank.capacity for rank in config.ranks] == [plan.params_bytes]
    assert config.slots == plan.placement.grad_homes.slots > 0
    assert {unit for unit, spec in enumerate(config.units) if spec.grads == "slot"} == {
        *plan.placement.grad_homes.spilled
    }
    assert (loop.accumulation, "clipped" in loop.norms) == (3, True)
    _, twice = planned(ALL["link"], tmp_path)
    assert all(unit.host for unit in twice.config.units if unit.offloaded)
    assert twice.config.staging_bytes > 0


def test_what_is_simulated_otherwise_is_named(tmp_path: Path) -> None:
    _, simulated = planned(ALL["layer_major"], tmp_path)
    assert any("layer-major" in note for note in simulated.notes)
    passes = [call for call in simulated.scenario(0).calls if isinstance(call, Pass) and not call.evaluates]
    assert {len(each.micro_batches) for each in passes} == {simulated.loop.layer_major} == {simulated.loop.accumulation}
    _, simulated = planned(ALL["ranks"], tmp_path)
    assert any("not exchanged between ranks" in note for note in simulated.notes)


def test_more_steps_begin_as_fewer_do(tmp_path: Path) -> None:
    _, simulated = planned(ALL["tight"], tmp_path)
    few, many = simulated.scenario(3, 4), simulated.scenario(3, 12)
    assert many.calls[: len(few.calls)] == few.calls
    assert many.config == few.config


# The command #


def arguments(path: Path, *more: str) -> list[str]:
    values = config_of(CASES["tight"], path, LARGE)
    (path / "config.json").write_text(json.dumps(values))
    return ["plan", "--model", "gpt2:tiny", "--config", str(path / "config.json"), "--simulate-faults", "30", *more]


def test_the_command_counts_what_it_simulated(tmp_path: Path, capsys) -> None:
    assert main(arguments(tmp_path, "--seed", "5", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)["faults"]
    assert (facts["steps"], facts["first_seed"], facts["violations"], facts["violation"]) == (30, 5, 0, None)
    assert facts["events"] > 100
    assert facts["seeds"] >= 3
    assert main(arguments(tmp_path)) == 0
    assert "30 steps simulated" in capsys.readouterr().out


def test_a_violation_names_its_seed_and_is_found_again(tmp_path: Path, capsys) -> None:
    with planted("pins_stay"):  # one that the steps of a prediction do not meet
        assert main(arguments(tmp_path, "--json")) == 1
        violation = json.loads(capsys.readouterr().out)["faults"]["violation"]
        repeat = violation["repeat"].split()
        assert repeat[-1] == str(violation["seed"])
        assert main([*arguments(tmp_path)[:-2], *repeat]) == 1
        out = capsys.readouterr().out
        assert violation["what"] in out
        assert violation["repeat"] in out
        assert all(name in out for name in violation["units"].values())


def test_options_that_make_no_sense_say_so(tmp_path: Path, capsys) -> None:
    assert main([*arguments(tmp_path)[:-2], "--seed", "3"]) == 2
    assert "--seed needs --simulate-faults" in capsys.readouterr().err
    assert main([*arguments(tmp_path)[:-1], "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_units_that_the_simulation_does_not_know_are_refused(tmp_path: Path) -> None:
    plan, _ = planned(ALL["tight"], tmp_path)
    specs = tuple(replace(spec, has_device_shard=True) for spec in plan.sizing.specs)
    plan = replace(plan, sizing=replace(plan.sizing, specs=specs))
    with pytest.raises(ConfigError, match="cannot be simulated"):
        planned_of(plan, load_config(config_of(ALL["tight"], tmp_path, LARGE)))
