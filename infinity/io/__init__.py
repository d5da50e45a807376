"""One asynchronous file interface with three backends: io_uring, threads, aiofiles."""

from infinity.io.interface import IoEngine, IoFile, IoFuture, IoOptions, IoStats, Priority, Span
from infinity.io.probe import BackendStatus, open_engine, probe_backends

__all__ = [
    "BackendStatus",
    "IoEngine",
    "IoFile",
    "IoFuture",
    "IoOptions",
    "IoStats",
    "Priority",
    "Span",
    "open_engine",
    "probe_backends",
]
