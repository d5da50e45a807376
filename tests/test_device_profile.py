"""What is said of a step's profile, on events that were made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.device_profile import Calls, Kind, Record, analyse, copy_name, merged, overlap_s, records_of


def kernel(start_s: float, end_s: float) -> Record:
    return Record(Kind.KERNEL, "gemm", start_s, end_s)


def copy(start_s: float, end_s: float, nbytes: int = 0, name: str = "HtoD pinned") -> Record:
    return Record(Kind.COPY, name, start_s, end_s, nbytes)


def call(name: str, start_s: float, end_s: float) -> Record:
    return Record(Kind.CALL, name, start_s, end_s)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(2, 3), (0, 1)], [(0, 1), (2, 3)]),
        ([(0, 2), (1, 3)], [(0, 3)]),
        ([(0, 9), (1, 2), (3, 4)], [(0, 9)]),
        ([(0, 1), (1, 2)], [(0, 2)]),
    ],
    ids=["none", "apart", "overlapping", "nested", "touching"],
)
def test_spans_are_merged(spans, expected) -> None:
    assert merged(spans) == expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([(0, 1)], [], 0),
        ([(0, 1)], [(1, 2)], 0),
        ([(0, 10)], [(1, 2), (3, 5), (9, 12)], 4),
        ([(0, 2), (4, 6)], [(1, 5)], 2),
    ],
)
def test_overlap_of_two_lists(left, right, expected) -> None:
    assert overlap_s(left, right) == overlap_s(right, left) == expected


def test_kernels_of_several_streams_count_once() -> None:
    found = analyse([kernel(0, 4), kernel(1, 2), kernel(3, 6)], wall_s=8)
    assert (found.kernels, found.kernel_s, found.computes) == (3, 6, 0.75)
    assert found.over_floor == 8 / 6


def test_copies_are_hidden_where_any_kernel_runs() -> None:
    records = [kernel(0, 1), kernel(2, 4), copy(0.5, 2.5, 600), copy(2, 3, 300), copy(9, 10, 50, "DtoH pageable")]
    found = analyse(records, wall_s=10).copies
    assert list(found) == ["DtoH pageable", "HtoD pinned"]
    up = found["HtoD pinned"]
    assert (up.count, up.nbytes, up.s, up.bytes_per_s, up.hidden) == (2, 900, 2.5, 360, 1.5 / 2.5)
    assert found["DtoH pageable"].hidden == 0


def test_gaps_are_long_or_short() -> None:
    """Those of one stream are none if another computes meanwhile."""
    records = [kernel(0, 1), kernel(1.0005, 2), kernel(2.5, 3), kernel(5, 6), kernel(2.9, 3.5)]
    gaps = analyse(records, wall_s=6).gaps
    assert (gaps.long_count, gaps.long_s) == (2, 2.0)
    assert gaps.short_s == pytest.approx(0.0005)
    assert gaps.longest_s[:2] == [1.5, 0.5]


def test_figures_are_those_of_one_step() -> None:
    records = [kernel(0, 1), kernel(2, 3), copy(0, 1, 100), copy(2, 3, 100), call("cudaMalloc", 0, 1)]
    found = analyse(records, wall_s=4, steps=2)
    assert (found.wall_s, found.kernels, found.kernel_s, found.computes) == (2, 1, 1, 0.5)
    assert (found.copies["HtoD pinned"].nbytes, found.copies["HtoD pinned"].bytes_per_s) == (100, 100)
    assert found.allocations == {"cudaMalloc": Calls(0.5, 0.5)}
    assert found.gaps.long_s == 0.5


def test_what_the_host_waits_in_and_allocates() -> None:
    names = ["cudaStreamSynchronize", "cudaStreamSynchronize", "cudaMemcpyAsync", "cudaMemcpy", "cudaLaunchKernel"]
    names += ["cudaStreamWaitEvent", "cudaEventSynchronize", "cudaHostRegister", "cudaMallocAsync"]
    found = analyse([call(name, 0, 1) for name in names], wall_s=1)
    assert {name: each.count for name, each in found.waits.items()} == {
        "cudaStreamSynchronize": 2,
        "cudaMemcpy": 1,
        "cudaEventSynchronize": 1,
    }
    assert set(found.allocations) == {"cudaHostRegister", "cudaMallocAsync"}


def test_a_profile_without_events() -> None:
    found = analyse([], wall_s=1)
    assert (found.computes, found.over_floor, found.gaps.long_s, found.copies) == (0, 0, 0, {})


def test_the_records_of_a_trace() -> None:
    def event(category: str, name: str, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": 1e6, "dur": 5e5} | more

    trace = [
        {"ph": "M", "name": "process_name"},
        event("kernel", "gemm"),
        event("cpu_op", "aten::mm"),
        event("gpu_memset", "Memset (Device)"),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", args={"bytes": 7, "stream": 9}),
        event("cuda_runtime", "cudaMalloc"),
        event("cuda_driver", "cuLaunchKernel", ph="s"),
    ]
    assert records_of(trace) == [
        kernel(1, 1.5),
        copy(1, 1.5, 7, "DtoH pageable"),
        call("cudaMalloc", 1, 1.5),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "HtoD pinned"),
        ("Memcpy HtoD (Pageable -> Device)", "HtoD pageable"),
        ("Memcpy DtoH (Device -> Pinned)", "DtoH pinned"),
        ("Memcpy DtoD (Device -> Device)", "DtoD"),
    ],
)
def test_kinds_of_copies(name, expected) -> None:
    assert copy_name(name) == expected
