"""Checksums of writes to the NVMe tier, to detect a drive that returns other bytes.

The checksums are in memory, eight bytes for each range that was written by one request (usually a tile). The thread
that waits for a read verifies them. XXH3 runs at memory speed, ten times faster than a drive.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity.distribution import install_command
from infinity.errors import ConfigError, StorageError
from infinity.io import IoFuture, Span
from infinity.telemetry import Times

try:
    import xxhash
except ImportError:
    xxhash = None  # type: ignore[assignment]


Locate = Callable[[int, int], Sequence[tuple[Path, int, int]]]  # (offset in the extent, bytes): file, offset, bytes


def check_available() -> None:
    """Raise ConfigError if the xxhash package is missing."""
    if xxhash is None:
        raise ConfigError(f"tiering.checksum needs the xxhash package: {install_command('checksum')}")


def _digest(span: Span) -> int:
    return xxhash.xxh3_64_intdigest((ctypes.c_char * span.nbytes).from_address(span.address))


class Checksums:
    """Digests of the ranges of one extent, by offset within it."""

    def __init__(self) -> None:
        self._digests: dict[int, tuple[int, int]] = {}  # offset: (nbytes, digest)

    def written(self, offset: int, span: Span) -> None:
        """Record the digest of `span`, which is about to be written at `offset` and must not change until then."""
        stop = offset + span.nbytes
        for start, (nbytes, _) in list(self._digests.items()):
            if start < stop and offset < start + nbytes:
                del self._digests[start]
        self._digests[offset] = (span.nbytes, _digest(span))

    def verified(self, read: IoFuture, offset: int, span: Span, locate: Locate) -> IoFuture:
        """Return a read that fails if a range within it does not have the bytes that were written to it."""
        stop = offset + span.nbytes
        expected = {
            start - offset: (nbytes, digest)
            for start, (nbytes, digest) in list(self._digests.items())
            if offset <= start and start + nbytes <= stop
        }

        def check() -> None:
            for start, (length, digest) in expected.items():
                if _digest(Span(span.address + start, length, span.owner)) != digest:
                    raise _damage(length, locate(offset + start, length))

        return Checked(read, check)


class Checked(IoFuture):
    """A request with a check. Only the first `result` runs the check, because the memory may change after it.

    Args:
        check: raises StorageError.
    """

    def __init__(self, request: IoFuture, check: Callable[[], None]) -> None:
        self._request = request
        self._check: Callable[[], None] | None = check
        self._lock = threading.Lock()
        self._problem: StorageError | None = None

    def done(self) -> bool:
        return self._request.done()

    def times(self) -> Times | None:
        return self._request.times()

    def result(self, timeout: float | None = None) -> int:
        nbytes = self._request.result(timeout)
        with self._lock:
            if self._check is not None:
                try:
                    self._check()
                except StorageError as error:
                    self._problem = error
                self._check = None
            if self._problem is not None:
                raise self._problem
        return nbytes


def _damage(nbytes: int, places: Sequence[tuple[Path, int, int]]) -> StorageError:
    """Return the error for a damaged range in these places, which has one digest."""
    (path, offset, _), *others = places
    also = "".join(f" and in {other}" for other, _, _ in others)
    return StorageError(
        errno.EBADMSG,
        f"the {nbytes} bytes read here{also} are not those that were written (checksum): the drive, its cable or the "
        "memory is failing; resume from the last checkpoint on another drive",
        str(path),
        offset,
    )
