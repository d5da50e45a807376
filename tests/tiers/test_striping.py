"""Space is given out in proportion, within capacities, without holes or overlaps."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import StorageError
from infinity.tiers.striping import Stripe, Striping

MIB = 1 << 20
SIZES = st.lists(st.integers(1, 24 * MIB // 4096).map(lambda pages: pages * 4096), min_size=1, max_size=30)


def striping(weights: list[float], capacity: int = 1 << 40) -> Striping:
    return Striping([Stripe(Path(f"/nvme{i}"), weight, capacity) for i, weight in enumerate(weights)])


@given(SIZES, st.lists(st.floats(0.5, 8), min_size=1, max_size=4))
def test_pieces_are_disjoint_and_make_up_the_extent(sizes, weights) -> None:
    space = striping(weights)
    ends = [0] * len(weights)
    for size in sizes:
        pieces = space.reserve(size)
        assert sum(piece.nbytes for piece in pieces) == size
        for piece in pieces:
            assert piece.offset == ends[piece.file]
            assert piece.offset % 4096 == 0
            ends[piece.file] += piece.nbytes
    assert space.sizes == ends


@given(SIZES, st.lists(st.floats(0.5, 8), min_size=2, max_size=4))
def test_drives_fill_in_proportion_to_their_weights(sizes, weights) -> None:
    space = striping(weights)
    for size in sizes:
        space.reserve(size)
        fair = sum(space.sizes) / sum(weights)
        for held, weight in zip(space.sizes, weights, strict=True):
            assert abs(held - weight * fair) <= 2 * MIB * len(weights)


def test_one_large_extent_uses_every_drive_in_proportion() -> None:
    pieces = striping([1.0, 3.0]).reserve(400 * MIB)
    assert [piece.nbytes for piece in pieces] == [100 * MIB, 300 * MIB]


def test_a_full_drive_leaves_the_rest_to_the_others() -> None:
    space = Striping([Stripe(Path("/a"), 1.0, 4 * MIB), Stripe(Path("/b"), 1.0, 100 * MIB)])
    space.reserve(60 * MIB)
    assert space.sizes == [4 * MIB, 56 * MIB]


def test_no_room_names_every_path_and_reserves_nothing() -> None:
    space = Striping([Stripe(Path("/a"), 1.0, 4 * MIB), Stripe(Path("/b"), 1.0, 8 * MIB)])
    space.reserve(4 * MIB)
    before = list(space.sizes)
    with pytest.raises(StorageError, match=r"/a \(2.00 MiB of 4.00 MiB taken\), /b \(2.00 MiB of 8.00") as full:
        space.reserve(20 * MIB)
    assert full.value.errno == errno.ENOSPC
    assert space.sizes == before
