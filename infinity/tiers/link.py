"""Copies between host memory and the compute device, on streams of their own.

The only file that knows streams and events. `HostMemory` is the link of the CPU to itself. `SameMemory` is that of a
device without a bus: it lets the whole path of a discrete device run, and be tested, on a machine that has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch

from infinity.io.gds import DeviceReader, HostReader, KvikioReader, gds_problem
from infinity.memory import DeviceLevel, device_level, free_bytes, pinning
from infinity.telemetry import Counters, StallCause, Times, now
from infinity.tiers.copies import Transfer


class Link(Protocol):
    """Starts copies; the host or the compute stream can wait for each. When it ran is known after `keep_times`.

    Attributes:
        discrete: the device is to have memory of its own.
        pinned_for: the device that host memory is pinned for; None where that is of no use.
    """

    device: torch.device
    discrete: bool
    pinned_for: torch.device | None

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        """Copy host -> device, after everything that the compute stream was given so far.

        Args:
            after: a `mark`: what the stream was given since then has nothing to do with the target.
        """

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        """Copy device -> host, after everything that the compute stream was given so far.

        Args:
            after: once this is over the source has its values. The copy waits for nothing else, nor for downloads
                without it.
        """

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        """As `download`, of several (target, source), one after the other, which costs the host little more than one."""

    def compute_waits(self, token: Transfer) -> None:
        """What the compute stream is given from now on runs after the copy."""

    def mark(self) -> Transfer:
        """Complete when everything is that the compute stream was given so far."""

    def keep_times(self) -> None:
        """Have the tokens of copies that are started from now on know when they ran."""

    def device_reader(self) -> DeviceReader | str:
        """Reads files into the device's memory past the host's; a string says why there is no such way."""

    def free_bytes(self) -> int:
        """What the device's memory has left; a great number where nothing limits it but host memory."""

    def level(self) -> DeviceLevel | None:
        """How full the device's memory is; None where it is the host's."""

    def forget_peak(self) -> None:
        """Have `level` give the most that tensors take from now on."""

    def release_cached(self) -> None:
        """Give the device's memory back that torch keeps for tensors to come."""


def accelerator() -> torch.device | None:
    """The kind of device that torch sees beside the CPU; None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


class AcceleratorLink:
    """A copy stream for each direction, so that uploads and downloads use both halves of the bus.

    The host runs ahead of the device, so that a stream's copies wait for what is not computed yet. Downloads of what is
    there already have a stream of their own.
    """

    discrete = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned_for: torch.device | None = device
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
    """Turns events of a device into times of the host's clock, by one moment that both know."""

    def __init__(self, device: torch.device) -> None:
        self._base = torch.Event(device, enable_timing=True)
        self._base.record(torch.accelerator.current_stream(device))
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def seconds(self, event: torch.Event) -> float:
        """When the event, which is complete, happened."""
        return self._base_s + float(self._base.elapsed_time(event)) / 1e3


class _EventToken:
    """What ran between two events; a moment, if there is only one."""

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
    """What torch is given inside runs on this stream and its device."""
    # A stream is a context manager of its own from torch 2.7 on.
    index = torch.accelerator.current_device_index()
    outside = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(outside)
        torch.accelerator.set_device_index(index)


def carried_stream(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Enters, on whichever thread, the stream that the device has on this one."""
    if device.type == "cpu":
        return nullcontext
    return partial(on_stream, torch.accelerator.current_stream(device))


def to_host(source: torch.Tensor, counters: Counters) -> torch.Tensor:
    """A copy in host memory, or `source` itself if it lies there."""
    if source.device.type == "cpu":
        return source
    torch.accelerator.current_stream(source.device).synchronize()  # until it is computed: work, and no stall
    start_s = time.perf_counter()
    with counters.stalled(StallCause.HOST_LINK):
        copy = source.cpu()
    counters.moved("device_to_host", source.nbytes, Times(start_s, start_s, time.perf_counter()), field="gradients")
    return copy


class SameMemory:
    """A device whose memory is the host's: copies are done when they return."""

    device = torch.device("cpu")
    discrete = True
    pinned_for: torch.device | None = None

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return self._copy(target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        return self._copy(target, source)

    def download_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Transfer:
        return [self.download(target, source) for target, source in pairs][-1]

    def compute_waits(self, token: Transfer) -> None:
        token.result()

    def mark(self) -> Transfer:
        return _Done(now())

    def keep_times(self) -> None:
        """They are known anyway."""

    def device_reader(self) -> DeviceReader | str:
        return HostReader()

    def free_bytes(self) -> int:
        return sys.maxsize

    def level(self) -> DeviceLevel | None:
        return None

    def forget_peak(self) -> None:
        """It keeps none."""

    def release_cached(self) -> None:
        """Torch keeps none."""

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Transfer:
        start_s = time.perf_counter()
        target.copy_(source)
        return _Done(Times(start_s, start_s, time.perf_counter()))


class HostMemory(SameMemory):
    """The CPU: what is computed on lies in host memory itself, and is copied only where it leaves a budget's part."""

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
