"""Where a step's time goes on a device: kernels, copies and waits, from the events that a profiler recorded.

`records_of` reads the events of a Chrome trace as torch.profiler writes it; `analyse` is arithmetic on plain records.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

LONG_GAP_S = 1e-3
_LONGEST_GAPS = 8
_WAITS = ("Synchronize", "cudaMemcpy", "cuMemcpy")  # a copy without Async in its name returns when it is done
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaHostRegister", "cudaHostUnregister", "cuMemCreate")

Span = tuple[float, float]


class Kind(Enum):
    KERNEL = "kernel"
    COPY = "copy"
    CALL = "call"  # of the host to the device's runtime


@dataclass(frozen=True)
class Record:
    kind: Kind
    name: str
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True)
class Copies:
    """Copies of one kind, a step.

    Attributes:
        s: when at least one of them was under way.
        hidden: the share of `s` in which a kernel ran, too.
    """

    count: float
    nbytes: float
    s: float
    bytes_per_s: float
    hidden: float


@dataclass(frozen=True)
class Calls:
    count: float
    s: float


@dataclass(frozen=True)
class Gaps:
    """Times without a kernel between the first and the last one."""

    long_count: float
    long_s: float
    short_s: float
    longest_s: list[float]


@dataclass(frozen=True)
class StepProfile:
    """Figures of one step; the mean of those that were profiled.

    Attributes:
        kernel_s: when at least one kernel ran.
        computes: the same as a share of the step.
        over_floor: the step over its floor, the busiest engine: kernels, or copies of one kind. The CPU's optimizer,
            which no profiler of a device sees, may be a higher one.
        copies: by direction and the kind of host memory, for example "HtoD pinned".
        waits: calls in which the host waits for the device, by name.
        allocations: calls that allocate, free, pin or unpin memory, by name.
    """

    wall_s: float
    kernels: float
    kernel_s: float
    computes: float
    over_floor: float
    copies: dict[str, Copies]
    gaps: Gaps
    waits: dict[str, Calls]
    allocations: dict[str, Calls]


# From a trace #


def records_of(trace_events: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The records among the `traceEvents` of a Chrome trace, whose times are in microseconds."""
    kinds = {"kernel": Kind.KERNEL, "gpu_memcpy": Kind.COPY, "cuda_runtime": Kind.CALL, "cuda_driver": Kind.CALL}
    found = []
    for event in trace_events:
        kind = kinds.get(event.get("cat", ""))
        if kind is None or event.get("ph") != "X":
            continue
        start_s, duration_s = event["ts"] / 1e6, event.get("dur", 0) / 1e6
        nbytes = int(event.get("args", {}).get("bytes", 0))
        name = copy_name(event["name"]) if kind is Kind.COPY else event["name"]
        found.append(Record(kind, name, start_s, start_s + duration_s, nbytes))
    return found


def copy_name(name: str) -> str:
    """ "HtoD pinned" for "Memcpy HtoD (Pinned -> Device)"."""
    direction = name.removeprefix("Memcpy ").split(" ")[0]
    memory = next((word for word in ("Pinned", "Pageable") if word in name), "")
    return f"{direction} {memory.lower()}".strip()


# Arithmetic #


def analyse(records: Sequence[Record], wall_s: float, steps: int = 1) -> StepProfile:
    """Figures a step of records of several steps, which took `wall_s` together."""
    kernels = [(each.start_s, each.end_s) for each in records if each.kind is Kind.KERNEL]
    computing = merged(kernels)
    copies: dict[str, list[Record]] = defaultdict(list)
    for each in records:
        if each.kind is Kind.COPY:
            copies[each.name].append(each)
    calls = [each for each in records if each.kind is Kind.CALL]
    kernel_s = length_s(computing)
    moved = {name: _copies(found, computing, steps) for name, found in sorted(copies.items())}
    floor_s = max([kernel_s / steps, *(each.s for each in moved.values())])
    return StepProfile(
        wall_s=wall_s / steps,
        kernels=len(kernels) / steps,
        kernel_s=kernel_s / steps,
        computes=kernel_s / wall_s,
        over_floor=wall_s / steps / floor_s if floor_s else 0.0,
        copies=moved,
        gaps=_gaps(computing, steps),
        waits=_calls((each for each in calls if _waits(each.name)), steps),
        allocations=_calls((each for each in calls if each.name.startswith(_ALLOCATIONS)), steps),
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not touch, in order."""
    found: list[Span] = []
    for start_s, end_s in sorted(spans):
        if found and start_s <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end_s)
        else:
            found.append((start_s, end_s))
    return found


def length_s(spans: Iterable[Span]) -> float:
    return sum(end_s - start_s for start_s, end_s in spans)


def overlap_s(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Seconds that lie in both; each is merged."""
    total_s, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total_s += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total_s


def _copies(found: Sequence[Record], computing: Sequence[Span], steps: int) -> Copies:
    spans = merged((each.start_s, each.end_s) for each in found)
    busy_s, nbytes = length_s(spans), sum(each.nbytes for each in found)
    return Copies(
        count=len(found) / steps,
        nbytes=nbytes / steps,
        s=busy_s / steps,
        bytes_per_s=nbytes / busy_s if busy_s else 0.0,
        hidden=overlap_s(spans, computing) / busy_s if busy_s else 1.0,
    )


def _gaps(computing: Sequence[Span], steps: int) -> Gaps:
    lengths_s = sorted((after[0] - before[1] for before, after in pairwise(computing)), reverse=True)
    long_s = [each for each in lengths_s if each > LONG_GAP_S]
    return Gaps(
        long_count=len(long_s) / steps,
        long_s=sum(long_s) / steps,
        short_s=sum(lengths_s[len(long_s) :]) / steps,
        longest_s=lengths_s[:_LONGEST_GAPS],
    )


def _calls(found: Iterable[Record], steps: int) -> dict[str, Calls]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for each in found:
        by_name[each.name].append(each.end_s - each.start_s)
    return {name: Calls(len(took) / steps, sum(took) / steps) for name, took in sorted(by_name.items())}


def _waits(name: str) -> bool:
    return "Async" not in name and any(name.startswith(word) or word in name for word in _WAITS)
