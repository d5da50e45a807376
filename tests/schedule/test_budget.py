"""What a memory budget pays for, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity.errors import CapacityError
from infinity.schedule import MemoryNeeds, MemorySplit, split_memory

NEEDS = MemoryNeeds(
    tile_bytes=1,
    ring_min_bytes=4,
    ring_bytes=4,
    params_min_bytes=20,
    params_bytes=100,
    grads_min_bytes=10,
    grads_overlap_bytes=20,
    grads_bytes=50,
    states_min_bytes=0,
    states_bytes=500,
    always_bytes=1,
    largest_unit="blocks.0",
    largest_unit_bytes=10,
)
LEAST = 1 + 4 + 20 + 10


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (0, MemorySplit(20, 10, 0, 4)),
        (5, MemorySplit(20, 15, 0, 4)),  # first what lets computing go on while a unit is updated
        (10 + 7, MemorySplit(27, 20, 0, 4)),  # then parameters
        (10 + 80 + 7, MemorySplit(100, 27, 0, 4)),  # then more gradients
        (10 + 80 + 30 + 7, MemorySplit(100, 50, 7, 4)),  # then states
        (10 + 80 + 30 + 600, MemorySplit(100, 50, 500, 4)),
    ],
)
def test_memory_goes_where_it_saves_most(spare, expected) -> None:
    assert split_memory(NEEDS, LEAST + spare) == expected


def test_too_little_is_refused_by_the_number_that_is_enough() -> None:
    with pytest.raises(CapacityError, match=rf"Raise tiering.host_memory to {LEAST} bytes .*"):
        split_memory(NEEDS, LEAST - 1)


def test_more_tiles_are_in_flight_where_they_are_a_small_part_of_memory() -> None:
    mib = 1 << 20
    needs = replace(NEEDS, tile_bytes=4 * mib, ring_min_bytes=16 * mib, ring_bytes=64 * mib)
    ring = {size: split_memory(needs, size * mib).ring_bytes // mib for size in (64, 800, 4096)}
    assert ring == {64: 16, 800: 48, 4096: 64}  # whole tiles


@pytest.mark.parametrize("params_min_bytes", [20, 2000])
def test_the_number_that_is_enough_is_enough_though_the_ring_grows_with_it(params_min_bytes: int) -> None:
    needs = replace(NEEDS, params_min_bytes=params_min_bytes, params_bytes=3000, ring_bytes=500)
    assert split_memory(needs, needs.least_bytes).ring_bytes == 4


def test_separate_shards_get_memory_after_the_units_in_use() -> None:
    needs = replace(NEEDS, homes_min_bytes=5, homes_bytes=30)
    assert split_memory(needs, LEAST + 5 + 10 + 80 + 7) == MemorySplit(100, 20, 0, 4, 12)


@pytest.mark.parametrize(("initial_bytes", "more"), [(12, 0), (18, 0), (25, 7), (80, 62)])
def test_values_on_their_way_at_initialize_have_the_room_of_what_comes_later(initial_bytes: int, more: int) -> None:
    """Gradients use it afterwards, as far as they are of use."""
    needs = replace(NEEDS, collecting_bytes=5, activations_bytes=3, initial_bytes=initial_bytes)
    assert needs.least_bytes == LEAST + 8 + more
    split = split_memory(needs, needs.least_bytes)
    assert split == MemorySplit(20, min(50, 10 + more), 0, 4)
    extra = needs.initial_extra_bytes(split)
    assert extra == max(0, more - 40)
    assert 1 + 4 + split.params_bytes + split.grads_bytes + 8 + extra == needs.least_bytes
    assert needs.most_bytes == max(needs.least_bytes, 1 + 4 + 100 + 500 + max(50 + 8, initial_bytes))


def test_what_only_some_placements_need_is_named_in_the_refusal() -> None:
    needs = replace(NEEDS, collecting_bytes=1 << 20, initial_bytes=3 << 20)
    with pytest.raises(CapacityError, match=r"between ranks 1.00 MiB, values on their way at initialize 3.00 MiB\. "):
        split_memory(needs, 0)
