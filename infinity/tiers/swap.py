"""The NVMe tier's space: extents striped over one swap file per directory."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from infinity.io import IoEngine, IoFile, IoFuture, IoOptions, Priority, Span, open_engine
from infinity.io.bench import BenchSession, bench_file
from infinity.memory import Arena
from infinity.telemetry import Times
from infinity.tiers.checksums import Checksums, check_available
from infinity.tiers.striping import Piece, Stripe, Striping
from infinity.tiers.swap_file import OwnedFile, create_owned, remove_stale

_log = logging.getLogger(__name__)
ALIGN_BYTES = 4096
_PROBE_BLOCK_BYTES, _PROBE_DEPTH = 4 << 20, 64
_PROBE_BYTES = 128 << 20  # a tenth of a second on a drive worth its slot


@dataclass(frozen=True)
class SwapPath:
    """A directory on a drive.

    Attributes:
        capacity_bytes: how much of it may be used; None for what is free.
        bytes_per_s: its bandwidth, by which work is shared out; None to measure it where it matters.
    """

    path: Path
    capacity_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Extent:
    """Space for `nbytes` that lies in one piece on each of some drives.

    Attributes:
        pieces: in the order of the content.
        nbytes: length, aligned.
        slot: copy number; a second copy of the same content is a layout choice.
    """

    pieces: tuple[Piece, ...]
    nbytes: int
    slot: int = 0


def open_swap(
    paths: Sequence[SwapPath],
    options: IoOptions,
    backend: str = "auto",
    *,
    checksum: bool = False,
    rank: int = 0,
) -> SwapSpace:
    """Swap space on these directories, with an engine, and so a queue of `options.queue_depth`, for each drive.

    Raises:
        ConfigError: the backend does not work here, or checksums are asked for without the xxhash package.
        StorageError: a directory cannot be used.
    """
    if checksum:
        check_available()
    for path in paths:
        remove_stale(path.path)  # what dead runs hold is free
    drives = [path.path.stat().st_dev for path in paths]
    weights = _weights(paths, drives, options, backend)
    stripes = [
        Stripe(path.path, weight, _capacity(path, len(paths))) for path, weight in zip(paths, weights, strict=True)
    ]
    engines: dict[int, IoEngine] = {}
    try:
        for drive in drives:
            if drive not in engines:
                engines[drive] = open_engine(options, backend)
        return SwapSpace([engines[drive] for drive in drives], stripes, checksum=checksum, rank=rank)
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise


class SwapSpace:
    """Extents over one swap file per directory.

    Reserve every extent, then `create`: the files are allocated whole, so that a full disk is an error at
    the start and not in the middle of a run. Without directories it is empty, and nothing may be reserved.

    Args:
        engines: of each directory; one engine may serve several. Closed with the space.
        checksum: verify on every read what was written.
    """

    def __init__(
        self, engines: Sequence[IoEngine], stripes: Sequence[Stripe], *, checksum: bool = False, rank: int = 0
    ) -> None:
        self._engines = tuple(engines)
        self._stripes = tuple(stripes)
        self._rank = rank
        self._striping = Striping(stripes)
        self._checksums: dict[Extent, Checksums] | None = {} if checksum else None
        self._files: list[IoFile] = []
        self._owned: list[OwnedFile] = []

    @property
    def size_bytes(self) -> int:
        return sum(self._striping.sizes)

    def reserve(self, nbytes: int) -> Extent:
        """Reserve an aligned extent.

        Raises:
            StorageError: no directory has room for it within its capacity.
        """
        nbytes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        extent = Extent(self._striping.reserve(nbytes), nbytes)
        if self._checksums is not None:
            self._checksums[extent] = Checksums()
        return extent

    def create(self) -> None:
        """Create the files at full size.

        Raises:
            StorageError: a path is missing, read-only or too full; nothing is left behind.
        """
        try:
            for stripe, size in zip(self._stripes, self._striping.sizes, strict=True):
                self._owned.append(create_owned(stripe.path, self._rank, size))
            for engine, owned in zip(self._engines, self._owned, strict=True):
                self._files.append(engine.open(owned.path, descriptor=owned.descriptor))
        except BaseException:
            self.close()
            raise

    def register(self, span: Span) -> None:
        """Have the kernel keep memory pinned that many requests will use."""
        for engine in dict.fromkeys(self._engines):
            engine.register(span)

    def read(self, extent: Extent, span: Span, offset: int = 0, *, priority: Priority) -> IoFuture:
        """Start reading `span.nbytes` from `offset` within the extent."""
        read = together(
            [
                self._engines[piece.file].read(self._files[piece.file], piece.offset, part, priority)
                for piece, part in overlapping(extent, span, offset)
            ]
        )
        if self._checksums is None:
            return read
        return self._checksums[extent].verified(read, offset, span, partial(_locate, self.files(), extent))

    def locate(self, extent: Extent, nbytes: int) -> list[tuple[Path, int, int]]:
        """Where the first bytes of an extent are: (file, offset, bytes) of each piece."""
        return _locate(self.files(), extent, 0, nbytes)

    def write(self, extent: Extent, span: Span, offset: int = 0) -> IoFuture:
        """Start writing `span` at `offset` within the extent."""
        if self._checksums is not None:
            self._checksums[extent].written(offset, span)
        return together(
            [
                self._engines[piece.file].write(self._files[piece.file], piece.offset, part)
                for piece, part in overlapping(extent, span, offset)
            ]
        )

    def files(self) -> tuple[Path, ...]:
        return tuple(owned.path for owned in self._owned)

    def close(self) -> None:
        """Finish what is in flight, then close and remove the files."""
        for engine in self._engines:
            engine.close()
        for file in self._files:
            file.close()
        self._files.clear()
        for owned in self._owned:
            owned.remove()
        self._owned.clear()


# Requests over several drives #


def overlapping(extent: Extent, span: Span, offset: int) -> list[tuple[Piece, Span]]:
    """What of each piece holds [offset, offset + span.nbytes), and the part of `span` that goes there."""
    parts = []
    starts = itertools.accumulate((piece.nbytes for piece in extent.pieces), initial=0)
    for piece, start in zip(extent.pieces, starts, strict=False):
        begin, end = max(offset, start), min(offset + span.nbytes, start + piece.nbytes)
        if begin < end:
            within = Piece(piece.file, piece.offset + begin - start, end - begin)
            parts.append((within, Span(span.address + begin - offset, end - begin, span.owner)))
    return parts


def _locate(files: Sequence[Path], extent: Extent, offset: int, nbytes: int) -> list[tuple[Path, int, int]]:
    """Where bytes of an extent are: (file, offset, bytes) of each piece."""
    parts = overlapping(extent, Span(0, nbytes, None), offset)
    return [(files[piece.file], piece.offset, part.nbytes) for piece, part in parts]


def together(requests: Sequence[IoFuture]) -> IoFuture:
    """All of these, as one request."""
    return requests[0] if len(requests) == 1 else _AllOf(requests)


class _AllOf(IoFuture):
    def __init__(self, requests: Sequence[IoFuture]) -> None:
        self._requests = tuple(requests)

    def done(self) -> bool:
        return all(request.done() for request in self._requests)

    def times(self) -> Times | None:
        parts = [times for request in self._requests if (times := request.times()) is not None]
        if not parts or len(parts) < len(self._requests):
            return None
        submitted_s, started_s, finished_s = zip(*parts, strict=True)
        return Times(min(submitted_s), min(started_s), max(finished_s))

    def result(self, timeout: float | None = None) -> int:
        """Waits for all of them, also if one fails: until then the memory is in use."""
        nbytes, failed = 0, None
        for request in self._requests:
            try:
                nbytes += request.result(timeout)
            except TimeoutError:
                raise
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return nbytes


# Drives #


def _capacity(path: SwapPath, alternatives: int) -> int:
    if path.capacity_bytes is not None:
        return path.capacity_bytes
    # With nowhere else to go, `create` is the better place to fail: it knows how much is needed in all.
    return _free_bytes(path.path) if alternatives > 1 else sys.maxsize


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def _weights(paths: Sequence[SwapPath], drives: Sequence[int], options: IoOptions, backend: str) -> list[float]:
    """Bandwidth of every directory: what is given, or measured if there is more than one drive to choose from."""
    if len(set(drives)) == 1 and all(path.bytes_per_s is None for path in paths):
        return [1.0] * len(paths)
    measured: dict[int, float] = {}
    for path, drive in zip(paths, drives, strict=True):
        if path.bytes_per_s is None and drive not in measured:
            measured[drive] = _measure(path.path, options, backend)
            _log.info("%s: %.2f GB/s, reading and writing", path.path, measured[drive] / 1e9)
    return [
        path.bytes_per_s if path.bytes_per_s is not None else measured[drive] / drives.count(drive)
        for path, drive in zip(paths, drives, strict=True)
    ]


def _measure(directory: Path, options: IoOptions, backend: str) -> float:
    options = replace(  # more tells nothing, and takes memory that is the model's
        options,
        block_size_bytes=min(options.block_size_bytes, _PROBE_BLOCK_BYTES),
        queue_depth=min(options.queue_depth, _PROBE_DEPTH),
    )
    size = max(16 * options.block_size_bytes, min(_PROBE_BYTES, _free_bytes(directory) // 8))
    arena = Arena(4 * options.block_size_bytes * options.queue_depth)
    try:
        with arena.lease(arena.capacity_bytes) as lease, bench_file(directory, size) as file:
            lease.tensor(torch.uint8).random_()
            with BenchSession(file, size, backend, options, lease.span()) as session:
                session.fill()
                return session.run("mixed").bytes_per_s
    finally:
        arena.close()
