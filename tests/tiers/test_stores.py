"""Which optimizer states stay in host memory, and which gradients have memory of their own."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.memory import Arena
from infinity.tiers import GradStore, cut_into_tiles, resident_tiles

UNIT = 1024  # elements; a page of float32


def same(numel: int) -> int:
    return numel


@given(
    shards=st.lists(st.integers(0, 2000), min_size=1, max_size=12),
    tile=st.integers(1, 300),
    resident_bytes=st.integers(0, 20_000),
)
def test_resident_tiles_keep_to_the_budget_and_begin_with_the_first_unit(
    shards: list[int], tile: int, resident_bytes: int
) -> None:
    sizes = list(cut_into_tiles(shards, tile))
    stay = resident_tiles(shards, tile, same, resident_bytes)
    assert len(stay) == len(sizes)
    held = sum(size for size, stays in zip(sizes, stay, strict=True) if stays)
    assert held <= resident_bytes
    if sum(sizes) <= resident_bytes:
        assert all(stay)
    first = len(list(cut_into_tiles([next((numel for numel in shards if numel), 0)], tile)))
    within = [*stay[:first], False].index(False)
    assert within == first or sum(sizes[: within + 1]) > resident_bytes


def test_the_tiles_beside_the_first_unit_are_spread_evenly() -> None:
    stay = resident_tiles([400] + [100] * 8, 100, same, 400 + 400)
    assert stay == [True] * 4 + [False, True] * 4


def test_the_largest_unit_has_gradients_of_its_own_where_there_is_room() -> None:
    """Others that are held in the pool leave no room for it in one piece."""
    numels = [8 * UNIT, *[UNIT] * 10]
    arena = Arena(4 * 16 * UNIT)
    store = GradStore(numels, torch.float32, arena, 4 * 12 * UNIT, standing=())
    held = [store.try_open(unit) for unit in range(1, 6)]
    assert [tensor is not None for tensor in held] == [True] * 4 + [False]
    assert store.try_open(0) is not None

    pooled = GradStore(numels, torch.float32, Arena(4 * 16 * UNIT), 4 * 8 * UNIT, standing=())
    assert pooled.try_open(1) is not None
    assert pooled.try_open(0) is None  # the room is for either
    pooled.drop(1)
    assert pooled.try_open(0) is not None


def test_two_equal_units_share_the_room_of_two() -> None:
    """One is computed while another is updated, whichever they are; none has memory of its own."""
    store = GradStore([UNIT] * 4, torch.float32, Arena(4 * 4 * UNIT), 4 * 2 * UNIT, standing=())
    for unit in (3, 2):
        assert store.try_open(unit) is not None
    assert store.try_open(1) is None
    store.hand_over(3).release()
    assert store.try_open(1) is not None
    store.drop(2)
    assert store.try_open(0) is not None
