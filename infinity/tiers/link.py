"""Copies between host memory and the compute device, on streams of their own.

The only file that knows streams and events. `SameMemory` is the link of a device without a bus: it lets the
whole path of a discrete device run, and be tested, on a machine that has none.
"""

from __future__ import annotations

from typing import Protocol

import torch

from infinity.io.gds import DeviceReader, HostReader, KvikioReader, gds_problem
from infinity.telemetry import Counters, StallCause


class Token(Protocol):
    """A copy that was started."""

    def query(self) -> bool:
        """The copy is complete."""

    def synchronize(self) -> None:
        """Block the host until the copy is complete."""


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

    def device_reader(self) -> DeviceReader | str:
        """Reads files into the device's memory past the host's; a string says why there is no such way."""


class CudaLink:
    """A copy stream for each direction, so that uploads and downloads use both halves of the bus."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(self._up, target, source)

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        return self._copy(self._down, target, source)

    def compute_waits(self, token: Token) -> None:
        torch.cuda.current_stream(self.device).wait_event(token)  # type: ignore[arg-type]

    def mark(self) -> Token:
        event: Token = torch.cuda.current_stream(self.device).record_event()
        return event

    def device_reader(self) -> DeviceReader | str:
        return gds_problem() or KvikioReader()

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Token:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event: Token = stream.record_event()
        return event


def to_host(source: torch.Tensor, counters: Counters) -> torch.Tensor:
    """A copy in host memory, or `source` itself if it lies there."""
    if source.device.type == "cpu":
        return source
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()  # until it is computed: work, and no stall
    counters.moved("device_to_host", source.nbytes)
    with counters.stalled(StallCause.HOST_LINK):
        return source.cpu()


class SameMemory:
    """A device whose memory is the host's: copies are done when they return."""

    device = torch.device("cpu")

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        target.copy_(source)
        return _Done()

    def download(self, target: torch.Tensor, source: torch.Tensor) -> Token:
        target.copy_(source)
        return _Done()

    def compute_waits(self, token: Token) -> None:
        token.synchronize()

    def mark(self) -> Token:
        return _Done()

    def device_reader(self) -> DeviceReader | str:
        return HostReader()


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
