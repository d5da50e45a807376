"""What is said of updates ahead of the norm on a CPU holds beside a device, whose copies arrive when they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.behaviour.test_speculation import (  # noqa: F401
    eager,
    fetched,
    gradients,
    seen,
    slow,
    test_at_any_budget,
    test_parameters_that_stay_in_memory_are_not_written,
    test_states_may_cease_to_tell_parameters,
    test_what_comes_between_backward_and_step,
    test_what_is_needed_later_makes_way,
    test_what_was_to_stay_may_leave,
    test_with_room_for_some_of_what_was_before,
    withdrawn,
)
from tests.device import target
from tests.device.training import SPEEDS


@pytest.fixture(autouse=True)
def _slow_link() -> Iterator[None]:
    """Whoever does not wait for a copy is there before it."""
    with target.configured(**SPEEDS["slow_link"]):
        yield
