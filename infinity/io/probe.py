"""Finds the backends that work on this machine, and chooses one."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from functools import lru_cache

from infinity.errors import ConfigError, InfinityError
from infinity.extension import missing_extension
from infinity.io.aiofiles_engine import AiofilesEngine
from infinity.io.interface import IoEngine, IoOptions
from infinity.io.threads import MORE_THREADS

try:
    from infinity.io.native import NativeEngine, uring_problem

    _NATIVE_PROBLEM = ""
except ImportError as error:  # the extension is not built
    _NATIVE_PROBLEM = f"the native extension is missing: {missing_extension('_aio')} ({error})"

_log = logging.getLogger(__name__)
BACKENDS = ("io_uring", "threads", "aiofiles")


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend works in this process, and the reason."""

    name: str
    available: bool
    reason: str


@lru_cache(maxsize=1)
def probe_backends() -> tuple[BackendStatus, ...]:
    """Try every backend, best first. The result is cached for the life of the process."""
    problem = _NATIVE_PROBLEM or uring_problem()
    return (
        BackendStatus("io_uring", not problem, problem or "the kernel accepts rings"),
        BackendStatus("threads", not _NATIVE_PROBLEM, _NATIVE_PROBLEM or "pread and pwrite work anywhere"),
        BackendStatus("aiofiles", True, "plain Python works anywhere"),
    )


def open_engine(options: IoOptions, backend: str = "auto") -> IoEngine:
    """Open an engine.

    Args:
        backend: `auto` uses the best backend that works and logs its choice; a name uses that backend or fails.

    Raises:
        ConfigError: the backend does not exist, or does not work on this machine; the message gives the reason.
    """
    statuses = {status.name: status for status in probe_backends()}
    if backend == "auto":
        chosen = next(status for status in statuses.values() if status.available)
        passed = [f"{s.name} not: {s.reason}" for s in statuses.values() if not s.available]
        _log.info("I/O backend %s (%s)", chosen.name, "; ".join([chosen.reason, *passed]))
        return _open(chosen.name, options)
    if backend not in statuses:
        raise ConfigError(f"I/O backend {backend!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    if not statuses[backend].available:
        raise ConfigError(f"I/O backend {backend} does not work here: {statuses[backend].reason}; use auto")
    return _open(backend, options)


def _open(backend: str, options: IoOptions) -> IoEngine:
    if backend == "aiofiles":
        return AiofilesEngine(options)
    try:
        return NativeEngine(backend, options)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise InfinityError(f"I/O backend {backend} cannot start a thread: {MORE_THREADS}") from error
        raise ConfigError(f"I/O backend {backend} cannot start with {options}: {error.strerror}") from error
