"""Copies between host memory and the compute device, on their own streams.

The only file that knows streams and events.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from infinity.errors import ConfigError
from infinity.io.gds import DeviceReader, HostReader, KvikioReader, gds_problem
from infinity.memory import DeviceLevel, device_level, free_bytes, pinning
from infinity.telemetry import Counters, StallCause, Times, now
from infinity.tiers.copies import Transfer


class Link:
    """Starts copies. Each returns a token, for which the host or the compute stream can wait.

    After `keep_times`, tokens have times. This class implements a device in host memory: copies are synchronous.

    Attributes:
        discrete: whether the device counts as having its own memory.
        pinned_for: the device that host memory is pinned for; None if pinning is of no use.
    """

    device = torch.device("cpu")
    discrete = True
    pinned_for: torch.device | None = None

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        """Copy host -> device, after all work that is already queued in the compute stream.

        Args:
            after: a `mark`: work queued after it does not touch the target, so the copy waits only for the mark.
        """
        return self._copy_now(target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        """Copy device -> host, after all work that is already queued in the compute stream.

        Args:
            after: the source has its values when this has ended. The copy waits for nothing else, not even for
                downloads without this argument.
        """
        return self._copy_now(target, source)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """Copy several (target, source) like `download`, in order. This costs the host little more than one copy."""
        return [self.download(target, source) for target, source in pairs][-1]

    def compute_waits(self, token: Transfer) -> None:
        """Order all later work of the compute stream behind the copy."""
        token.result()

    def mark(self) -> Transfer:
        """Return a token that completes when all work that is already queued in the compute stream is done."""
        return _Done(now())

    def keep_times(self) -> None:
        """Record the times of copies that are started from now on."""

    def device_reader(self) -> DeviceReader | str:
        """Return a reader of files straight into the device's memory, or the reason why there is none."""
        return HostReader()

    def free_bytes(self) -> int:
        """Return the free memory of the device; a very large number if only host memory limits it."""
        return sys.maxsize

    def level(self) -> DeviceLevel | None:
        """Return how full the device's memory is; None if it is the host's."""
        return None

    def forget_peak(self) -> None:
        """Reset the peak that `level` reports."""

    def release_cached(self) -> None:
        """Free the device memory that torch caches."""

    def _copy_now(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        start_s = time.perf_counter()
        target.copy_(source)
        return _Done(Times(start_s, start_s, time.perf_counter()))


class SameMemory(Link):
    """A device in host memory that runs the code of a discrete device, for tests on machines without one."""


class HostMemory(Link):
    """The CPU: the model computes in host memory, and only values that leave the memory of a budget are copied."""

    discrete = False


class _Done:
    def __init__(self, times: Times) -> None:
        self._times = times

    def times(self) -> Times:
        return self._times

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch sees; None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def compute_device(name: torch.device | str | None) -> torch.device:
    """Return the device of this name; without a name, the accelerator if there is one, else the CPU.

    Raises:
        ConfigError: a device that does not exist, or that torch does not see.
    """
    seen = accelerator()
    try:
        chosen = torch.device(name or seen or "cpu")
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} does not exist; choose cpu, cuda or another kind") from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if seen is None or chosen.type != seen.type:
        others = "" if seen is None else f" or {seen.type}"
        raise ConfigError(f"device {chosen} is not available; torch sees cpu{others}")
    count = torch.accelerator.device_count()
    if chosen.index is not None and chosen.index >= count:
        raise ConfigError(f"device {chosen} is not available; torch sees {count} of its kind")
    return chosen


class AcceleratorLink(Link):
    """One copy stream for each direction, so that uploads and downloads use both directions of the bus.

    The host runs ahead of the device, so the copies of a stream may wait for work that is queued and not computed yet.
    Downloads of values that are already computed have a stream of their own, where they need not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = self.pinned_for = device
        self._clock: _DeviceClock | None = None
        self._up = torch.Stream(device)
        self._down = torch.Stream(device)
        self._down_early = torch.Stream(device)

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return self._copy(self._up, [(target, source)], after)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return self._copy(self._down if after is None else self._down_early, [(target, source)], after)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        return self._copy(self._down, pairs)

    def compute_waits(self, token: Transfer) -> None:
        assert isinstance(token, _EventToken)  # of this link
        torch.accelerator.current_stream(self.device).wait_event(token.end)

    def mark(self) -> Transfer:
        stream = torch.accelerator.current_stream(self.device)
        return _EventToken(None, self._record(stream), self._clock)

    def keep_times(self) -> None:
        self._clock = _DeviceClock(self.device)

    def device_reader(self) -> DeviceReader | str:
        return gds_problem() or KvikioReader()

    def free_bytes(self) -> int:
        return free_bytes(self.device)

    def level(self) -> DeviceLevel | None:
        return device_level(self.device)

    def forget_peak(self) -> None:
        torch.get_device_module(self.device).reset_peak_memory_stats(self.device)

    def release_cached(self) -> None:
        torch.get_device_module(self.device).empty_cache()

    def _copy(
        self, stream: torch.Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Transfer | None = None
    ) -> Transfer:
        if after is None:
            stream.wait_stream(torch.accelerator.current_stream(self.device))
        else:
            assert isinstance(after, _EventToken)  # of this link
            stream.wait_event(after.end)
        start = None if self._clock is None else self._record(stream)
        with on_stream(stream):
            for target, source in pairs:
                for there, here in pinning.copies(target, source):
                    there.copy_(here, non_blocking=True)
        return _EventToken(start, self._record(stream), self._clock)

    def _record(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=self._clock is not None)
        event.record(stream)
        return event


class _DeviceClock:
    """Converts events of a device to times of the host's clock, by one moment whose time is known on both clocks."""

    def __init__(self, device: torch.device) -> None:
        self._base = torch.Event(device, enable_timing=True)
        self._base.record(torch.accelerator.current_stream(device))
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def seconds(self, event: torch.Event) -> float:
        """Return the time of a completed event."""
        return self._base_s + float(self._base.elapsed_time(event)) / 1e3


class _EventToken:
    """The work between two events, or one moment."""

    def __init__(self, start: torch.Event | None, end: torch.Event, clock: _DeviceClock | None) -> None:
        self._start = start
        self.end = end
        self._clock = clock

    def done(self) -> bool:
        return bool(self.end.query())

    def result(self) -> None:
        self.end.synchronize()

    def times(self) -> Times | None:
        if self._clock is None or not self.end.query():
            return None
        end_s = self._clock.seconds(self.end)
        start_s = end_s if self._start is None else self._clock.seconds(self._start)
        return Times(start_s, start_s, end_s)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Run the torch work inside of this context on this stream and its device."""
    # From torch 2.7 on, a stream is itself a context manager.
    index = torch.accelerator.current_device_index()
    outside = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(outside)
        torch.accelerator.set_device_index(index)


def carried_stream(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts in which another thread uses this thread's current stream of the device."""
    if device.type == "cpu":
        return nullcontext
    return partial(on_stream, torch.accelerator.current_stream(device))


def to_host(source: torch.Tensor, counters: Counters) -> torch.Tensor:
    """Return a copy in host memory, or `source` itself if it is in host memory."""
    if source.device.type == "cpu":
        return source
    torch.accelerator.current_stream(source.device).synchronize()  # waiting for the computation counts as no stall
    start_s = time.perf_counter()
    with counters.stalled(StallCause.HOST_LINK):
        copy = source.cpu()
    counters.moved("device_to_host", source.nbytes, Times(start_s, start_s, time.perf_counter()), field="gradients")
    return copy
