"""The arena hands out what it has and no more; stable buffers keep their addresses and give their pages back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.errors import CapacityError, InfinityError
from infinity.memory import Arena, Budget, Ledger, SparePages, StableBuffer
from infinity.memory.arena import ALIGN_BYTES, FreeList
from infinity.memory.mapping import _PlainMapping, make_mapping
from tests import prepared

MIB = 1 << 20


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(1, 40), st.none()), max_size=60), st.randoms(use_true_random=False))
def test_the_free_list_never_hands_out_a_byte_twice_and_coalesces(steps, rng) -> None:
    capacity = 100
    free = FreeList(capacity)
    taken: list[tuple[int, int]] = []
    for size in steps:
        if size is None:
            if taken:
                free.give(*taken.pop(rng.randrange(len(taken))))
            continue
        start = free.take(size)
        if start is None:
            assert free.largest < size
        else:
            taken.append((start, size))
        ranges = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(ranges))
        assert all(a >= 0 and a + n <= capacity for a, n in ranges)
    for start, size in taken:
        free.give(start, size)
    assert free.largest == capacity


def test_leases_are_aligned_disjoint_and_counted() -> None:
    arena = Arena(MIB)
    first, second = arena.lease(5000), arena.lease(4096)
    assert first.address % 4096 == 0 == second.address % 4096
    first.tensor(torch.uint8).fill_(1)
    second.tensor(torch.uint8).fill_(2)
    assert first.tensor(torch.uint8).unique().tolist() == [1]
    assert arena.used_bytes == 8192 + 4096
    first.release()
    second.release()
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 8192 + 4096
    with arena.lease(MIB) as whole:
        assert whole.tensor(torch.float32, 10, offset_bytes=4096).numel() == 10
        assert whole.span(4096, 8192).address == whole.address + 4096


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    arena = Arena(MIB)
    with arena.lease(MIB // 2):
        assert arena.try_lease(MIB) is None
        with pytest.raises(CapacityError, match=r"512.00 KiB of 1.00 MiB are in use and the largest hole has 512.00 K"):
            arena.lease(MIB)


def test_a_lease_is_released_once() -> None:
    lease = Arena(MIB).lease(4096)
    lease.release()
    with pytest.raises(InfinityError, match="released before"):
        lease.release()


def test_a_stable_buffer_keeps_its_tensors_and_gives_memory_back() -> None:
    nbytes = 64 * MIB
    buffer = StableBuffer(nbytes)
    tensor = buffer.tensor(torch.float32, nbytes // 4)
    view = tensor[: 1024 * 1024].view(1024, 1024).t()
    before = resident_bytes()
    buffer.allocate()
    tensor.fill_(3.0)
    assert resident_bytes() - before > nbytes * 0.9
    buffer.free()
    assert resident_bytes() - before < nbytes * 0.1
    buffer.allocate()
    tensor.fill_(4.0)
    assert view.data_ptr() == buffer.address
    assert view[5, 7].item() == 4.0
    buffer.close()


def test_pages_go_from_one_buffer_to_the_next_of_its_size() -> None:
    nbytes = 64 * MIB
    spare = SparePages()
    one, other, small = (StableBuffer(size, spare) for size in (nbytes, nbytes, MIB + 4096))
    before = resident_bytes()
    for round_index in range(3):
        for buffer in (one, other):
            buffer.allocate()
            tensor = buffer.tensor(torch.float32, nbytes // 4)
            if round_index or buffer is other:
                assert tensor[7].item() == tensor[-1].item() == 3.0, "pages that the system gave anew are zero"
            tensor.fill_(3.0)
            assert nbytes * 0.9 < resident_bytes() - before < nbytes * 1.1
            buffer.free()
    one.allocate()
    assert one.tensor(torch.float32, nbytes // 4).sum().item() == 3.0 * (nbytes // 4)
    one.free()
    small.allocate()
    small.tensor(torch.float32, 8).fill_(1.0)
    assert resident_bytes() - before < nbytes * 0.1, "what is spare goes before memory of another size is taken"
    small.free()
    spare.clear()
    one.allocate()
    assert one.tensor(torch.float32, nbytes // 4)[9].item() == 0.0
    one.close()


@pytest.mark.parametrize("then", ["pass", "other.allocate()"])
def test_touching_a_buffer_whose_pages_are_spare_or_have_gone_on_ends_the_process(then) -> None:
    script = f"""
import torch
from infinity.memory import SparePages, StableBuffer
spare = SparePages()
one, other = StableBuffer(8 << 20, spare), StableBuffer(8 << 20, spare)
one.allocate(); one.tensor(torch.float32, 8).fill_(1.0); one.free()
{then}
print("value", one.tensor(torch.float32, 8).sum())
"""
    done = prepared.run(["-c", script], timeout=60)
    assert done.returncode < 0, "no signal ended it"
    assert "value" not in done.stdout


def test_touching_a_freed_stable_buffer_ends_the_process_rather_than_reading_zeros() -> None:
    script = """
import torch
from infinity.memory import StableBuffer
buffer = StableBuffer(8 << 20)
tensor = buffer.tensor(torch.float32, 1024)
buffer.allocate(); tensor.fill_(1.0); buffer.free()
print("value", tensor[3].item())
"""
    done = prepared.run(["-c", script], timeout=60)
    assert done.returncode < 0, "no signal ended it"
    assert "value" not in done.stdout


@pytest.mark.parametrize("nbytes", [2**64 - 1, 2**64 - 4096])
def test_more_memory_than_there_are_addresses_is_refused(nbytes) -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        make_mapping(nbytes, 2 << 20)


def test_the_plain_mapping_serves_without_the_extension() -> None:
    mapping = _PlainMapping(8192, 4096)
    assert mapping.address % 4096 == 0
    assert mapping.nbytes == 8192
    mapping.open()
    mapping.shut()


def test_a_budget_refuses_what_exceeds_it() -> None:
    budget = Budget("host memory", 100)
    budget.take(60, "a")
    with pytest.raises(CapacityError, match="b needs 50 B of host memory, but 60 B of 100 B are used"):
        budget.take(50, "b")
    budget.give(60)
    budget.take(100, "c")
    assert budget.peak_bytes == 100


def test_the_parts_of_a_ledger_stay_within_it_together() -> None:
    ledger = Ledger("host memory", 100_000)
    parameters = ledger.open("parameters", 40_000)
    ledger.fix("states", 30_000)
    ledger.fix("nothing", 0)
    parameters.take(10_000, "a")
    parameters.give(10_000)
    assert list(ledger.parts) == ["parameters", "states"]
    assert ledger.peak_bytes == 40_000
    with pytest.raises(
        CapacityError, match=r"is 97.66 KiB but .* need 156.25 KiB \(parameters .* to 156.25KiB or more"
    ):
        ledger.open("gradients", 90_000)


def test_leases_move_together_with_what_they_hold() -> None:
    """Large and small ones begin at different ends; gaps are closed where one large one is asked for."""
    arena = Arena(8 * ALIGN_BYTES)
    part = arena.part(6 * ALIGN_BYTES, counts_leases=True)
    assert arena.used_bytes == 0
    leases = [part.lease(size * ALIGN_BYTES) for size in (1, 2, 1)]
    for number, lease in enumerate(leases):
        lease.tensor(torch.uint8).fill_(number)
    small = part.try_lease(ALIGN_BYTES, at_end=True)
    assert small is not None
    assert small.address == leases[0].address + 5 * ALIGN_BYTES
    assert (part.used_bytes, arena.used_bytes) == (5 * ALIGN_BYTES, 5 * ALIGN_BYTES)
    leases.pop(0).release()
    small.release()
    assert part.try_lease(3 * ALIGN_BYTES) is None
    part.close_gaps(leases)
    large = part.try_lease(3 * ALIGN_BYTES)
    assert large is not None
    for number, lease in enumerate(leases, 1):
        assert lease.tensor(torch.uint8).eq(number).all()
    assert (part.used_bytes, part.peak_bytes, arena.used_bytes) == (
        6 * ALIGN_BYTES,
        6 * ALIGN_BYTES,
        6 * ALIGN_BYTES,
    )
    arena.close()
