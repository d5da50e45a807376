"""The engine takes the actions on the emulated device that are written down."""

from __future__ import annotations

import pytest

from tests.action_logs.cases import ON_DEVICE
from tests.action_logs.worlds import WORLDS
from tests.action_logs.write import golden, logs_of
from tests.device import target

pytestmark = target.emulated_only


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ON_DEVICE)
def test_actions_are_those_that_are_written_down(name, world) -> None:
    assert logs_of(name, world) == golden(name, world).read_text()
