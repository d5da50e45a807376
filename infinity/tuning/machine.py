"""Measurements of the machine for the search: its rates, and the rate of the drives with each aio setting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity import __version__, kernels
from infinity.io import IoOptions
from infinity.io.bench import BenchSession, bench_file, check_space, ring_bytes
from infinity.memory import free_bytes
from infinity.memory.filled import random_memory
from infinity.planner import Duplex
from infinity.profiling.contention import contention
from infinity.profiling.drives import drive_rates
from infinity.profiling.link import link_rates
from infinity.profiling.processor import optimizer_rates
from infinity.profiling.products import operation_cost, product_rates
from infinity.profiling.record import new_record
from infinity.tiers import accelerator
from infinity.tuning.space import Aio

_FILE_BYTES = 128 << 20
_ALONE_S = 0.5  # length of one measurement of the drives
_AIO_S = 0.25
_AIO_ROUNDS = 3
_PARAMS = 4 << 20
_SHAPES = ((256 << 10, 32), (1 << 20, 8), (1 << 20, 32), (4 << 20, 8))  # block, depth
Progress = Callable[[str], None]


@dataclass(frozen=True)
class MachineJob:
    """What to measure.

    Attributes:
        paths: directories on the drives; if empty, drives are not measured.
        aio: the aio setting of the given configuration.
        sqpoll, iopoll, threads: the same for every aio setting.
        dtype: the dtype that the model computes in, by torch's name.
        on_cpu: compute on the CPU even if there is an accelerator.
    """

    paths: tuple[str, ...]
    aio: Aio
    threads: int
    sqpoll: bool
    iopoll: bool
    dtype: str
    on_cpu: bool = False

    def ways(self) -> tuple[Aio, ...]:
        """Return the aio settings to measure: the given one first, then others with the backend `auto`."""
        shapes = [self.aio, *((block, depth, "auto") for block, depth in _SHAPES)]
        return tuple(dict.fromkeys(shapes)) if self.paths else (self.aio,)

    def options(self, aio: Aio) -> IoOptions:
        return IoOptions(aio[0], aio[1], self.threads, self.sqpoll, self.iopoll)


def measure_machine(job: MachineJob, progress: Progress, profile: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure the machine in about 15 seconds.

    Args:
        progress: called with the name of the next measurement.
        profile: a profile of `infinity profile`; with it, only the aio settings are measured.

    Returns:
        `profile`, in the format of `infinity profile`; `aio`: [block, depth, backend, bytes a second] for reads and
        writes at once; `device_bytes` and `device` of a device with memory of its own, or None.

    Raises:
        StorageError: a path cannot be used, or a file would fill its drive.
    """
    for path in job.paths:
        check_space(Path(path), _FILE_BYTES)  # fail before the long measurements
    device = None if job.on_cpu else accelerator()
    if profile is None:
        profile = _profile(job, device, progress)
    return {
        "profile": profile,
        "aio": _aio(job, progress) if job.paths else [],
        "device": None if device is None else device.type,
        "device_bytes": None if device is None else free_bytes(device),
    }


def _profile(job: MachineJob, device: torch.device | None, progress: Progress) -> dict[str, Any]:
    begin_s, taken_at_s = time.perf_counter(), time.time()
    dtypes = (getattr(torch, job.dtype),)
    progress("matrix products")
    parts: dict[str, Any] = {
        "products": product_rates(torch.device("cpu"), dtypes),
        "operations": [operation_cost(torch.device("cpu"))],
    }
    if device is not None:
        progress(f"link to {device.type}")
        parts["products"] += product_rates(device, dtypes)
        parts["operations"].append(operation_cost(device))
        parts["link"] = link_rates(device)
    progress("optimizer")
    parts["optimizer"], parts["memory"] = optimizer_rates(_PARAMS, [kernels.thread_count()], lambda _: None)
    if job.paths:
        progress("drives")
        drives = [Path(path) for path in job.paths], _FILE_BYTES, job.options(job.aio), job.aio[2], _ALONE_S
        parts |= drive_rates(*drives, _PARAMS, lambda _: None, computes_here=device is None)
    else:
        parts["contention"] = contention(_PARAMS, None, _ALONE_S, computes_here=device is None)
    return new_record(__version__, taken_at_s, time.perf_counter() - begin_s, parts)


def _aio(job: MachineJob, progress: Progress) -> list[list[Any]]:
    """Measure the aio settings in turn, several times, so that a drive that slows down affects all of them alike."""
    ways = job.ways()
    rates: dict[Aio, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        file = stack.enter_context(bench_file(Path(job.paths[0]), _FILE_BYTES))
        buffers = stack.enter_context(random_memory(max(ring_bytes(job.options(way)) for way in ways)))
        with BenchSession(file, _FILE_BYTES, "auto", IoOptions(4 << 20, 8, job.threads), buffers) as session:
            session.fill()
        for _ in range(_AIO_ROUNDS):
            for way in ways:
                progress(f"the drive in blocks of {way[0] >> 10} KiB, {way[1]} at a time")
                with BenchSession(file, _FILE_BYTES, way[2], job.options(way), buffers) as session:
                    until_s = time.perf_counter() + _AIO_S
                    rates[way].append(session.run("mixed", until_s=until_s).bytes_per_s)
    return [[*way, statistics.median(seen)] for way, seen in rates.items()]


def drives_of(disk: Duplex, machine: dict[str, Any], aio: Aio) -> dict[Aio, Duplex]:
    """Return the rates of the drives with each aio setting, in proportion to their rates with `aio`.

    Args:
        disk: rates of the drives with `aio`.
    """
    rates: dict[Aio, float] = {(entry[0], entry[1], entry[2]): entry[3] for entry in machine["aio"]}
    own = rates.get(aio)
    if own is None:
        return {aio: disk}
    whole = (disk.inward, disk.outward, disk.both)
    return {way: Duplex(*(each * rate / own for each in whole)) for way, rate in rates.items()}


def best_ways(machine: dict[str, Any], count: int) -> Sequence[Aio]:
    """Return the fastest `count` aio settings. Of settings within 5%, those with fewer bytes in flight come first."""
    fastest = max((entry[3] for entry in machine["aio"]), default=0.0)
    entries = sorted(machine["aio"], key=lambda entry: (-round(20 * entry[3] / fastest), entry[0] * entry[1]))
    return [(entry[0], entry[1], entry[2]) for entry in entries[:count]]
