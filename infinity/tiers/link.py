"""Copies between host memory and the compute device, on streams of their own.

The only file that knows streams and events. `SameMemory` is the link of a device without a bus: it lets the
whole path of a discrete device run, and be tested, on a machine that has none.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from infinity.io.gds import DeviceReader, HostReader, KvikioReader, gds_problem
from infinity.telemetry import Counters, StallCause, Times, now


class Token(Protocol):
    """A copy that was started."""

    def query(self) -> bool:
        """The copy is complete."""

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""

    def times(self) -> Times | None:
        """When it ran on the device, once `Link.keep_times` was called; None while it is not complete."""


class Link(Protocol):
    """Starts copies; the host or the compute stream can wait for each."""

    device: torch.device

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        """Copy host -> device, after everything that the compute stream was given so far."""

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        """Copy device -> host, after everything that the compute stream was given so far."""

    def compute_waits(self, token: Token) -> None:
        """What the compute stream is given from now on runs after the copy."""

    def mark(self) -> Token:
        """Complete when everything is that the compute stream was given so far."""

    def keep_times(self) -> None:
        """Have the tokens of copies that are started from now on know when they ran."""

    def device_reader(self) -> DeviceReader | str:
        """Reads files into the device's memory past the host's; a string says why there is no such way."""


class CudaLink:
    """A copy stream for each direction, so that uploads and downloads use both halves of the bus."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clock: _DeviceClock | None = None
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(self._up, target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(self._down, target, source)

    def compute_waits(self, token: Token) -> None:
        assert isinstance(token, _CudaToken)  # of this link
        torch.cuda.current_stream(self.device).wait_event(token.end)

    def mark(self) -> Token:
        stream = torch.cuda.current_stream(self.device)
        return _CudaToken(None, self._record(stream), self._clock)

    def keep_times(self) -> None:
        self._clock = _DeviceClock(self.device)

    def device_reader(self) -> DeviceReader | str:
        return gds_problem() or KvikioReader()

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Token:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        start = None if self._clock is None else self._record(stream)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _CudaToken(start, self._record(stream), self._clock)

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=self._clock is not None)
        event.record(stream)
        return event


class _DeviceClock:
    """Turns events of a device into times of the host's clock, by one moment that both know."""

    def __init__(self, device: torch.device) -> None:
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(torch.cuda.current_stream(device))
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float:
        """When the event, which is complete, happened."""
        return self._base_s + float(self._base.elapsed_time(event)) / 1e3


class _CudaToken:
    """What ran between two events; a moment, if there is only one."""

    def __init__(self, start: torch.cuda.Event | None, end: torch.cuda.Event, clock: _DeviceClock | None) -> None:
        self._start = start
        self.end = end
        self._clock = clock

    def query(self) -> bool:
        return bool(self.end.query())

    def synchronize(self) -> None:
        self.end.synchronize()

    def times(self) -> Times | None:
        if self._clock is None or not self.end.query():
            return None
        end_s = self._clock.seconds(self.end)
        start_s = end_s if self._start is None else self._clock.seconds(self._start)
        return Times(start_s, start_s, end_s)


def to_host(source: torch.Tensor, counters: Counters) -> torch.Tensor:
    """A copy in host memory, or `source` itself if it lies there."""
    if source.device.type == "cpu":
        return source
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()  # until it is computed: work, and no stall
    start_s = time.perf_counter()
    with counters.stalled(StallCause.HOST_LINK):
        copy = source.cpu()
    counters.moved("device_to_host", source.nbytes, Times(start_s, start_s, time.perf_counter()), field="gradients")
    return copy


class SameMemory:
    """A device whose memory is the host's: copies are done when they return."""

    device = torch.device("cpu")

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(target, source)

    def compute_waits(self, token: Token) -> None:
        token.synchronize()

    def mark(self) -> Token:
        return _Done(now())

    def keep_times(self) -> None:
        """They are known anyway."""

    def device_reader(self) -> DeviceReader | str:
        return HostReader()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        start_s = time.perf_counter()
        target.copy_(source)
        return _Done(Times(start_s, start_s, time.perf_counter()))


class _Done:
    def __init__(self, times: Times) -> None:
        self._times = times

    def times(self) -> Times:
        return self._times

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
