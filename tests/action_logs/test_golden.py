"""The engine takes the actions that are written down, in both worlds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.action_logs.cases import BATCH, CASES, WIDTH, make
from tests.action_logs.worlds import WORLDS, world_of
from tests.action_logs.write import golden, logs_of


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_actions_are_those_that_are_written_down(name, world) -> None:
    assert logs_of(name, world) == golden(name, world).read_text()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["all_fits", "tight", "tightest", "tight_deferred"])
def test_between_steps_units_that_come_and_go_show_no_values(name, world, tmp_path: Path) -> None:
    """Also where what ends is the last step's update, and this step's is in the optimizer's queue behind it."""
    made = torch.Generator().manual_seed(1)
    with world_of(world), make(CASES[name], tmp_path) as engine:
        for _ in range(4):
            engine.backward(engine(torch.randint(3 * WIDTH, (BATCH, 4), generator=made)))
            engine.step()
            for block in engine.module.blocks:
                assert all(param.isnan().all() for param in block.parameters())
