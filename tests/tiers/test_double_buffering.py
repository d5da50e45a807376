"""Two slots a range: what an epoch's bits name is on the drive until the next epoch is committed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.config import NvmeConfig
from infinity.errors import CheckpointError, StorageError
from infinity.io import IoOptions, Priority, Span
from infinity.memory import Arena
from infinity.tiers import SwapSpace, open_swap
from infinity.tiers.records import Generation, Record, first_difference, parse_record
from infinity.tiers.run_files import find_record
from infinity.tiers.slots import Extent, SlotExtent, Slots
from infinity.tiers.striping import Piece, Stripe

BLOCK = 4096
BOUNDS = (0, BLOCK, 3 * BLOCK, 4 * BLOCK)


def committed() -> Future[None]:
    gate: Future[None] = Future()
    gate.set_result(None)
    return gate


def extent(start: int = 0) -> SlotExtent:
    size = BOUNDS[-1]
    slots = (Extent((Piece(0, start, size),), size), Extent((Piece(0, start + size, size),), size))
    return SlotExtent(slots, BOUNDS)


@pytest.fixture
def space(tmp_path):
    space = open_swap([NvmeConfig(tmp_path)], IoOptions(), "threads")
    yield space
    space.close()


@given(st.lists(st.one_of(st.tuples(st.integers(0, 1), st.integers(0, 2)), st.just("close")), max_size=40))
@settings(max_examples=60)
def test_what_was_closed_last_is_never_overwritten(events) -> None:
    """A dict of bytes by (extent, slot, range) is the drive; every write has a number of its own."""
    slots, extents = Slots(), [extent(), extent(8 * BLOCK)]
    for each in extents:
        slots.extents.append(each)
    drive: dict[tuple[int, int, int], int] = {}
    kept: dict[tuple[int, int], int | None] = {}
    bits = b""
    number = 0
    for event in events:
        if event == "close":
            bits, _ = slots.close_epoch(committed())
            kept = {(e, r): drive.get((e, extents[e].newest[r], r)) for e in range(2) for r in range(len(BOUNDS) - 1)}
            continue
        which, index = event
        number += 1
        each = extents[which]
        slots.to_write(each, Span(0, BOUNDS[index + 1] - BOUNDS[index], None), BOUNDS[index])
        drive[which, each.newest[index], index] = number
        if bits:
            for (e, r), value in kept.items():
                assert drive.get((e, bits[e * (len(BOUNDS) - 1) + r], r)) == value


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 1), st.integers(0, 2)), st.sampled_from(["close", "next", "undo 0", "undo 1"])
        ),
        max_size=40,
    )
)
@settings(max_examples=60)
def test_the_writes_of_an_epoch_can_be_rolled_back(events) -> None:
    """As above; `undo` finds what was the newest when the epoch began."""
    slots, extents = Slots(), [extent(), extent(8 * BLOCK)]
    for each in extents:
        slots.extents.append(each)
    drive: dict[tuple[int, int, int], int] = {}
    ranges = range(len(BOUNDS) - 1)

    def newest(which: int) -> list[int | None]:
        return [drive.get((which, extents[which].newest[index], index)) for index in ranges]

    begun = [newest(0), newest(1)]
    for number, event in enumerate(events):
        if event in ("close", "next"):
            if event == "close":
                slots.close_epoch(committed())
            else:
                slots.next_epoch()
            begun = [newest(0), newest(1)]
            assert all(slots.keeps(each) for each in extents)
        elif isinstance(event, str):
            which = int(event[-1])
            changed = newest(which) != begun[which]
            assert slots.roll_back(extents[which]) == changed
            assert newest(which) == begun[which]
            assert slots.keeps(extents[which])
        else:
            which, index = event
            slots.to_write(extents[which], Span(0, BOUNDS[index + 1] - BOUNDS[index], None), BOUNDS[index])
            drive[which, extents[which].newest[index], index] = number
            assert not slots.keeps(extents[which])


def test_a_read_gets_the_newest_of_each_range_and_a_part_cannot_be_written(space: SwapSpace) -> None:
    each = space.reserve_slots(BOUNDS[-1], BOUNDS)
    space.create()
    arena = Arena(2 * BOUNDS[-1])
    with arena.lease(BOUNDS[-1]) as source, arena.lease(BOUNDS[-1]) as target:
        values = source.tensor(torch.uint8)
        values.fill_(1)
        space.write(each, source.span(0, BOUNDS[-1])).result()
        space.slots.close_epoch(committed())
        values.fill_(2)
        space.write(each, source.span(0, 2 * BLOCK), BLOCK).result()  # the range in the middle
        space.read(each, target.span(0, BOUNDS[-1]), priority=Priority.DEMAND).result()
        found = target.tensor(torch.uint8).view(4, BLOCK).float().mean(1).tolist()
        assert found == [1, 2, 2, 1]
        with pytest.raises(RuntimeError, match="no whole ranges"):
            space.write(each, source.span(0, BLOCK), BLOCK)
    arena.close()


def test_a_write_waits_for_the_commit_before_and_gets_its_error(space: SwapSpace) -> None:
    each = space.reserve_slots(BOUNDS[-1], BOUNDS)
    space.create()
    gate: Future[None] = Future()
    space.slots.close_epoch(gate)
    gate.set_exception(StorageError(5, "flush failed", "/drive", 0))
    arena = Arena(BOUNDS[-1])
    with arena.lease(BOUNDS[-1]) as lease, pytest.raises(StorageError, match="flush failed"):
        space.write(each, lease.span(0, BOUNDS[-1]))
    arena.close()


def test_an_epoch_with_a_failed_write_is_not_closed() -> None:
    slots = Slots()
    failed: Future[None] = Future()
    failed.set_exception(StorageError(5, "write failed", "/drive", 0))
    for write in (failed, *(committed() for _ in range(99))):  # after so many, it is not in the list any more
        slots.opened(write)
    with pytest.raises(StorageError, match="write failed"):
        slots.close_epoch(committed())


def test_no_room_for_two_versions_is_reported_with_the_bytes(tmp_path) -> None:
    space = open_swap([NvmeConfig(tmp_path, capacity_bytes=6 * BLOCK)], IoOptions(), "threads")
    with pytest.raises(StorageError, match=r"keeps two slots .* without it half"):
        space.reserve_slots(BOUNDS[-1], BOUNDS)
    space.close()


def state(steps: int) -> dict[str, Any]:
    counters = {"global_steps": steps, "micro_steps": steps, "skipped_steps": 0}
    return {"counters": counters, "steps": {"weight": steps}, "time_s": 1.0}


RECORD = Record(
    run="0123456789abcdef",
    rank=0,
    ranks=1,
    facts={"model": {"layers": 2}},
    stripes=[Stripe(Path("/drive"), 1.0, 1 << 40)],
    sizes=[4096],
    layout="x",
    generations=[Generation(7, state(7), b"\0\1\1", b"extra"), Generation(6, state(6), b"\1", b"")],
)


def test_a_record_comes_back_as_it_was() -> None:
    assert parse_record(Path("record"), RECORD.to_bytes()) == RECORD


def test_a_record_with_any_byte_changed_or_missing_is_refused() -> None:
    content = RECORD.to_bytes()
    for index in range(len(content)):
        changed = bytearray(content)
        changed[index] ^= 1
        with pytest.raises(CheckpointError, match="damaged"):
            parse_record(Path("record"), bytes(changed))
        with pytest.raises(CheckpointError, match="damaged"):
            parse_record(Path("record"), content[:index])


def test_a_record_without_states_is_refused_unless_it_is_the_first(tmp_path) -> None:
    """Files of states get their names behind the first record."""
    path = tmp_path / f"infinity-{RECORD.run}-r0.record"
    for sequence in (1, 2):
        record = replace(RECORD, generations=[Generation(sequence, state(sequence), b"", b"")])
        path.write_bytes(record.to_bytes())
        path.chmod(0o600)
        if sequence == 1:
            assert find_record([tmp_path], 0) is None
            assert not path.exists()
    with pytest.raises(CheckpointError, match=r"d0\.slots is missing, of the states that"):
        find_record([tmp_path], 0)


def test_the_first_difference_of_facts_is_named() -> None:
    saved = {"model": {"layers": 2, "heads": 4}}
    assert first_difference(saved, saved) is None
    assert first_difference(saved, {"model": {"layers": 3, "heads": 4}}) == "model: layers was 2 and is 3 here"
    assert first_difference(saved, {"model": {"layers": 2}}) == "model: heads is only there"
