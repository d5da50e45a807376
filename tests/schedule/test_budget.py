"""What a memory budget pays for, and in which order."""

from __future__ import annotations

import pytest

from infinity.errors import CapacityError
from infinity.schedule import MemoryNeeds, MemorySplit, split_memory

NEEDS = MemoryNeeds(
    ring_bytes=4,
    params_min_bytes=20,
    params_bytes=100,
    grads_min_bytes=10,
    grads_flowing_bytes=20,
    grads_bytes=50,
    states_bytes=500,
    always_bytes=1,
    largest_unit="blocks.0",
    largest_unit_bytes=10,
)
LEAST = 1 + 4 + 20 + 10


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (0, MemorySplit(20, 10, 0)),
        (5, MemorySplit(20, 15, 0)),  # first what lets computing go on while a unit is updated
        (10 + 7, MemorySplit(27, 20, 0)),  # then parameters
        (10 + 80 + 7, MemorySplit(100, 27, 0)),  # then more gradients
        (10 + 80 + 30 + 7, MemorySplit(100, 50, 7)),  # then states
        (10 + 80 + 30 + 600, MemorySplit(100, 50, 500)),
    ],
)
def test_memory_goes_where_it_saves_most(spare, expected) -> None:
    assert split_memory(NEEDS, LEAST + spare, "tiering.host_memory") == expected


def test_too_little_is_refused_by_the_number_that_is_enough() -> None:
    with pytest.raises(CapacityError, match=rf"Raise tiering.host_memory to {LEAST} bytes .*"):
        split_memory(NEEDS, LEAST - 1, "tiering.host_memory")
