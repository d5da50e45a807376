"""Which gradients have memory of their own."""

from __future__ import annotations

import torch

from infinity.memory import Arena
from infinity.schedule.placement import place_gradients
from infinity.telemetry import Counters
from infinity.tiers import GradStore, HostMemory, Norms, SwapSpace

UNIT = 1024  # elements; a page of float32


def in_memory(numels: list[int], arena: Arena, capacity_bytes: int) -> GradStore:
    homes = place_gradients([4 * numel for numel in numels], (), capacity_bytes, spills=False)
    return GradStore(
        numels,
        numels,
        torch.float32,
        arena,
        capacity_bytes,
        homes,
        Counters(),
        SwapSpace((), ()),
        Norms(0, HostMemory()),
    )


def test_the_largest_unit_has_gradients_of_its_own_where_there_is_room() -> None:
    """Others that are held in the pool leave no room for it in one piece."""
    numels = [8 * UNIT, *[UNIT] * 10]
    arena = Arena(4 * 16 * UNIT)
    store = in_memory(numels, arena, 4 * 12 * UNIT)
    held = [store.open(store.units[unit]) for unit in range(1, 6)]
    assert [tensor is not None for tensor in held] == [True] * 4 + [False]
    assert store.open(store.units[0]) is not None

    pooled = in_memory(numels, Arena(4 * 16 * UNIT), 4 * 8 * UNIT)
    assert pooled.open(pooled.units[1]) is not None
    assert pooled.open(pooled.units[0]) is None  # the room is for either
    pooled.drop(pooled.units[1])
    assert pooled.open(pooled.units[0]) is not None


def test_two_equal_units_share_the_room_of_two() -> None:
    """One is computed while another is updated, whichever they are; none has memory of its own."""
    store = in_memory([UNIT] * 4, Arena(4 * 4 * UNIT), 4 * 2 * UNIT)
    for unit in (3, 2):
        assert store.open(store.units[unit]) is not None
    assert store.open(store.units[1]) is None
    store.take_for_update(store.units[3])
    store.drop_after_update(store.units[3])
    assert store.open(store.units[1]) is not None
    store.drop(store.units[2])
    assert store.open(store.units[0]) is not None
