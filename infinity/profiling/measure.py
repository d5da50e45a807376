"""Measures a profile: what is measured, in which order, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import __version__, kernels
from infinity.config import format_size
from infinity.errors import CapacityError
from infinity.io import IoOptions
from infinity.io.bench import check_space
from infinity.memory import available_memory_bytes
from infinity.profiling.collectives import collective_rates
from infinity.profiling.contention import contention, contention_of_ranks, with_those_of_ranks
from infinity.profiling.drives import OPERATIONS, drive_rates, written_bytes
from infinity.profiling.link import link_rates
from infinity.profiling.processor import matmul_rates, optimizer_rates, thread_counts
from infinity.profiling.products import operation_cost, product_rates
from infinity.profiling.record import new_record
from infinity.tiers import accelerator
from infinity.zero.ranks import Ranks

_MOST_PARAMS = 16 << 20  # far more than caches hold
_LEAST_PARAMS = 1 << 20
_BYTES_PER_PARAM = 80  # all state formats at once, and the triad's arrays
_BESIDE_S = 0.5
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class ProfileJob:
    """What to measure.

    Attributes:
        paths: directories on drives; if empty, drives are not measured.
        size_bytes: size of the file on each drive.
        seconds: length of one measurement of a drive.
        params: the most parameters of the optimizer that is timed; fewer if memory is short.
    """

    paths: tuple[Path, ...]
    size_bytes: int
    options: IoOptions
    backend: str
    seconds: float = 2.0
    params: int = _MOST_PARAMS


def planned_write_bytes(job: ProfileJob) -> int:
    """Return the most bytes that a profile writes, on all drives together."""
    return written_bytes(len(job.paths), job.size_bytes)


def run_profile(job: ProfileJob, ranks: Ranks, progress: Progress) -> dict[str, Any]:
    """Measure the machine of rank 0, and return its profile on every rank. All ranks must call it.

    Args:
        progress: called with what was just measured, and the share of all measurements that are done, 0 to 1.

    Raises:
        StorageError: a path cannot be used, or a file would fill its drive.
        CapacityError: too little memory is free.
    """
    begin_s, taken_at_s = time.perf_counter(), time.time()
    device = accelerator()
    parts = ranks.on_rank_0(lambda: _machine(job, device, progress))
    parts["ranks"] = collective_rates(ranks, device or torch.device("cpu"))
    if ranks.size > 1:
        sizes = _params(job.params) // ranks.size // 2048 * 2048, min(_BESIDE_S, job.seconds)
        of_ranks = contention_of_ranks(ranks, *sizes, computes_here=device is None)
        parts["contention"] = with_those_of_ranks(parts["contention"], of_ranks)
    return new_record(__version__, taken_at_s, time.perf_counter() - begin_s, parts)


def _machine(job: ProfileJob, device: torch.device | None, progress: Progress) -> dict[str, Any]:
    for path in job.paths:
        check_space(path, job.size_bytes)  # fail before the long measurements
    counts = thread_counts(kernels.thread_count())
    params = _params(job.params)
    steps = len(job.paths) * (1 + len(OPERATIONS)) + (len(OPERATIONS) if len(job.paths) > 1 else 0)
    steps += 1 + len(counts) + (5 if device is not None else 2)
    done = 0

    def report(what: str) -> None:
        nonlocal done
        done += 1
        progress(what, done / steps)

    progress("optimizer", 0.0)
    parts: dict[str, Any] = {}
    parts["optimizer"], parts["memory"] = optimizer_rates(params, counts, report)
    parts["matmul"] = matmul_rates(torch.device("cpu"), _DTYPES)
    report("matrix products")
    parts["products"] = product_rates(torch.device("cpu"), _DTYPES)
    parts["operations"] = [operation_cost(torch.device("cpu"))]
    report("products of layers")
    if device is not None:
        parts["matmul"] += matmul_rates(device, _DTYPES)
        report(f"matrix products on {device.type}")
        parts["products"] += product_rates(device, _DTYPES)
        parts["operations"].append(operation_cost(device))
        report(f"products of layers on {device.type}")
        parts["link"] = link_rates(device)
        report(f"link to {device.type}")
    here = device is None
    if job.paths:
        drives = job.paths, job.size_bytes, job.options, job.backend, job.seconds
        return parts | drive_rates(*drives, params, report, computes_here=here)
    parts["contention"] = contention(params, None, min(_BESIDE_S, job.seconds), computes_here=here)
    report("optimizer and products beside one another")
    return parts


def _params(most: int) -> int:
    """Return how many parameters fit into a quarter of the free memory, at most `most`."""
    free = available_memory_bytes()
    params = min(most, free // 4 // _BYTES_PER_PARAM)
    if params < min(most, _LEAST_PARAMS):
        raise CapacityError(
            "too little memory is free for the measurement: it needs "
            f"{format_size(4 * _LEAST_PARAMS * _BYTES_PER_PARAM)}, and {format_size(free)} are free"
        )
    return params // 2048 * 2048
