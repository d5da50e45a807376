"""The tests of speculative updates on a CPU also hold on a device whose copies take time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.behaviour.test_speculation import (  # noqa: F401
    eager,
    fetched,
    gradients,
    seen,
    slow,
    test_a_unit_with_a_speculative_update_may_be_evicted,
    test_an_update_of_a_unit_needed_later_is_withdrawn,
    test_at_any_budget,
    test_parameters_that_cannot_be_reconstructed_are_written_again,
    test_parameters_that_stay_in_memory_are_not_written,
    test_what_comes_between_backward_and_step,
    test_with_an_undo_log_for_some_units,
    withdrawn,
)
from tests.device import target
from tests.device.training import SPEEDS


@pytest.fixture(autouse=True)
def _slow_link() -> Iterator[None]:
    """Copies take so long that a missing wait reads old values."""
    with target.configured(**SPEEDS["slow_link"]):
        yield
