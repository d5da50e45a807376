"""The planner simulates a step with the actions that the engine takes in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.config import Config, load_config
from infinity.errors import CapacityError
from infinity.planner import Machine, Rates, TrainingPlan, count_work, plan_training, with_numbers
from infinity.planner.lanes import Lanes, Task
from infinity.planner.simulated_step import PARTS, TimedRank
from infinity.planner.step_work import step_work
from infinity.schedule.actions import Action, Evict, Fetch, Spill, Submit, SubmitSpeculative
from tests.action_logs.cases import BATCH, CASES, LARGE, ON_DEVICE, STEPS, Case, Stack, config_of
from tests.action_logs.write import golden
from tests.behaviour.reference import named_budget

UNFORESEEN = {
    "branches": "what is left out of a step is not known before",
    "speculative_clips": "a step is simulated as one whose gradients are not clipped",
    "frozen_in_files": "a plan is made without the files of the weights",
    "ranks": "an update waits until all ranks have found its gradients finite, while they compute on",
    "ranks_stage_2": "as above",
    "ranks_deferred_sums": "gradients are reduced while the next unit is computed on",
    "device_half_there": "how many states the device takes depends on its memory",
}
MOVES_ALONE = {"layer_major": "micro-batches that are in a block together are simulated as one"}
ALL = CASES | ON_DEVICE
FORESEEN = [name for name in ALL if name not in UNFORESEEN]
LAST_STEP = f"# step {STEPS - 1}\n"
RATES = with_numbers(Rates(), flop_per_s=1e3, optimizer_params_per_s=1e30, disk_bytes_per_s=1e30, link_bytes_per_s=1e30)


class Counted(Stack):
    """Called as the planner calls a model to count its work."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids)


class Prompt(Lanes):
    """All but computing is over at once."""

    def put(self, lane: str, seconds: float, *args: Any, **options: Any) -> Task:
        return super().put(lane, 0.0 if seconds < 1e-15 else seconds, *args, **options)


class Logged(TimedRank):
    """Writes actions down, and has each update end before it goes on."""

    def __init__(self, *args: Any) -> None:
        self.actions: list[Action | str] = []
        super().__init__(*args)

    def perform(self, action: Action) -> None:
        self.actions.append(action)
        super().perform(action)
        if isinstance(action, Submit | SubmitSpeculative):
            row = action.unit
            self.lanes.wait_until(lambda: row.ticket is None or row.ticket.done, "optimizer")
            if isinstance(action, SubmitSpeculative) and row.speculative is None:
                del self.actions[-1]  # nothing of it can be rolled back

    def _begin_phase(self, name: str) -> None:
        self.actions.append(name)
        super()._begin_phase(name)


def planned(case: Case, path: Path) -> tuple[TrainingPlan, Config]:
    """The plan of a case, with the room that the case has."""
    machine = Machine(case.ranks, case.ranks, None if case.device == "cpu" else 1 << 30)

    def config(host_memory: int) -> Config:
        return load_config(config_of(case, path, host_memory), world_size=case.ranks)

    host_memory = LARGE
    if case.room is not None:
        with pytest.raises(CapacityError) as refusal:
            plan_training(Counted(), config(1), machine)
        params = sum(param.nbytes for param in Counted().parameters())
        host_memory = named_budget(refusal.value) + int(case.room * params)
    return plan_training(Counted(), config(host_memory), machine), config(host_memory)


def simulated(case: Case, path: Path) -> list[str]:
    """The last step, in the words of a golden log."""
    plan, config = planned(case, path)
    work = count_work(Counted(), plan, BATCH, 4)
    rank = Logged(step_work(plan, config, work, RATES), Prompt(PARTS, lambda busy: dict.fromkeys(busy, 1.0)))
    rank.train()
    last = [index for index, action in enumerate(rank.actions) if action == "forward"][-plan_passes(case)]
    names = [spec.name or "the rest" for spec in plan.sizing.specs]
    return [words for action in rank.actions[last:] if (words := _words(action, names)) is not None]


def plan_passes(case: Case) -> int:
    """Forward passes of a step; layer-major ones are taken for one."""
    return 1 if case.tiering.get("accumulation") == "layer" else case.accumulation


def _words(action: Action | str, names: list[str]) -> str | None:
    match action:
        case Fetch(unit):
            return f"fetch {names[unit.index]}"
        case Evict(unit):
            return f"evict {names[unit.index]}"
        case Spill(unit):
            return f"spill {names[unit.index]}"
        case Submit(unit, write, needed) | SubmitSpeculative(unit, write, needed):
            when = "now" if needed < 0 else needed
            return f"submit {names[unit.index]}{', written' if write else ''}, needed {when}"
    return None


_ACTION = re.compile(
    r"(?:: |, )(fetch|evict|spill|submit) ([\w.]+)(?: \(\d+\))?(?: tiles [-\d]+)?(, written)?(, needed \w+)?"
)


def logged(name: str) -> list[str]:
    """What the engine did in the last step on the first rank."""
    log = golden(name, "prompt").read_text()
    step = log.split(LAST_STEP)[1].split("# rank")[0]
    return [f"{what} {unit}{written or ''}{needed or ''}" for what, unit, written, needed in _ACTION.findall(step)]


@pytest.mark.parametrize("name", FORESEEN)
def test_the_planner_takes_the_actions_that_the_engine_takes(name, tmp_path) -> None:
    here, there = simulated(ALL[name], tmp_path), logged(name)
    if name in MOVES_ALONE:
        here, there = ([words for words in log if not words.startswith("submit")] for log in (here, there))
    if ALL[name].schedule == "speculative":  # where the old parameters are decides on whether new ones are written
        here, there = ([words.replace(", written", "") for words in log] for log in (here, there))
    assert here == there
