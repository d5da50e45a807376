"""The engine takes the actions that are written down, in both worlds."""

from __future__ import annotations

import pytest

from tests.action_logs.cases import CASES
from tests.action_logs.worlds import WORLDS
from tests.action_logs.write import golden, logs_of


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_actions_are_those_that_are_written_down(name, world) -> None:
    assert logs_of(name, world) == golden(name, world).read_text()
