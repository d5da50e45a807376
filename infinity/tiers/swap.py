"""Space of the NVMe tier: extents striped over one swap file per directory."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import disk_usage

from infinity.config import NvmeConfig
from infinity.errors import CheckpointError, InfinityError, StorageError
from infinity.io import IoEngine, IoFile, IoFuture, IoOptions, IoStats, Priority, Span, open_engine
from infinity.io.bench import BenchSession, bench_file
from infinity.io.directory import NO_ROOM
from infinity.io.interface import together
from infinity.memory import aligned
from infinity.memory.filled import random_memory
from infinity.tiers.checksums import Checksums, check_available
from infinity.tiers.records import Generation
from infinity.tiers.run_files import RunFiles
from infinity.tiers.slots import Extent, Part, SlotExtent, Slots
from infinity.tiers.striping import Piece, Stripe, Striping
from infinity.tiers.swap_file import OwnedFile, adopt_owned, create_owned, remove_stale

_log = logging.getLogger(__name__)
_PROBE_BLOCK_BYTES, _PROBE_DEPTH = 4 << 20, 64
_PROBE_BYTES = 128 << 20  # takes a tenth of a second on a fast drive


def open_swap(
    paths: Sequence[NvmeConfig],
    options: IoOptions,
    backend: str = "auto",
    *,
    checksum: bool = False,
    rank: int = 0,
    run: RunFiles | None = None,
) -> SwapSpace:
    """Open swap space on these directories. Each drive has an engine, with a queue of `options.queue_depth`.

    Args:
        paths: a capacity of None means all free space; a bandwidth of None is measured if the paths are on several
            drives.
        run: the run that owns the files, if they must outlive the process.

    Raises:
        ConfigError: the backend does not work on this machine, or the xxhash package for checksums is missing.
        StorageError: a directory cannot be used.
    """
    if checksum:
        check_available()
    for path in paths:
        remove_stale(path.path)  # free the space of dead runs
    drives = [_drive(path.path) for path in paths]
    if run is not None and run.found is not None:
        stripes = list(run.found.stripes)  # the layout of adopted files follows from these
    else:
        weights = _weights(paths, drives, options, backend)
        stripes = [
            Stripe(path.path, weight, _capacity(path, len(paths))) for path, weight in zip(paths, weights, strict=True)
        ]
    with ExitStack() as undo:
        engines = {drive: undo.enter_context(closing(open_engine(options, backend))) for drive in dict.fromkeys(drives)}
        space = SwapSpace([engines[drive] for drive in drives], stripes, checksum=checksum, rank=rank, run=run)
        undo.pop_all()
    return space


class SwapSpace:
    """Extents over one swap file per directory.

    Reserve every extent, then call `create`. It allocates the files at full size, so that a full disk is an error at
    the start and not during a run. Without directories, nothing can be reserved.

    Args:
        engines: one for each directory; directories may share an engine. Closed with the space.
        checksum: verify every read against the checksums of the writes.
        run: the run that owns the files, if they must outlive the process.

    Attributes:
        slots: the double-buffered extents.
        run: the argument `run`.
        verifies: the argument `checksum`. Reads are verified by the ranges in which they were written.
        flush: flushes a file to its drive; takes a descriptor.
    """

    def __init__(
        self,
        engines: Sequence[IoEngine],
        stripes: Sequence[Stripe],
        *,
        checksum: bool = False,
        rank: int = 0,
        run: RunFiles | None = None,
    ) -> None:
        self.slots = Slots()
        self.run = run
        self.verifies = checksum
        self.flush: Callable[[int], None] = os.fdatasync
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

    @property
    def capacity_bytes(self) -> int:
        """The most that can be reserved on the drives, given their free space now."""
        free_bytes: dict[int, int] = {}
        for stripe in self._stripes:
            with suppress(OSError):  # a missing directory has no free space
                free_bytes[stripe.path.stat().st_dev] = disk_usage(stripe.path).free
        limits = sum(stripe.capacity_bytes for stripe in self._stripes)
        return min(limits, self.size_bytes + sum(free_bytes.values()))

    def io_stats(self) -> list[tuple[list[Path], IoStats]]:
        """Return each drive's directories and I/O counters. Thread-safe."""
        paths: dict[IoEngine, list[Path]] = {}
        for engine, stripe in zip(self._engines, self._stripes, strict=True):
            paths.setdefault(engine, []).append(stripe.path)
        return [(of_engine, engine.stats()) for engine, of_engine in paths.items()]

    def reserve(self, nbytes: int) -> Extent:
        """Reserve an aligned extent. Raises StorageError if no directory has room for it within its capacity."""
        nbytes = aligned(nbytes)
        extent = Extent(self._striping.reserve(nbytes), nbytes)
        if self._checksums is not None:
            self._checksums[extent] = Checksums()
        return extent

    def reserve_slots(self, nbytes: int, bounds: Sequence[int]) -> SlotExtent:
        """Reserve a double-buffered, aligned extent.

        Args:
            bounds: first byte of each range that is written whole, then the end of the last.

        Raises:
            StorageError: no directory has room for it within its capacity.
        """
        try:
            slots = self.reserve(nbytes), self.reserve(nbytes)
        except StorageError as error:
            raise self._two_slots(error) from error
        extent = SlotExtent(slots, tuple(bounds))
        self.slots.extents.append(extent)
        return extent

    def create(self) -> None:
        """Create the files at full size, or adopt the files of an earlier process.

        Raises:
            StorageError: a path is missing, read-only or too full; new files are removed again.
        """
        try:
            for index, (stripe, size) in enumerate(zip(self._stripes, self._striping.sizes, strict=True)):
                self._owned.append(self._own(index, stripe.path, size))
            for engine, owned in zip(self._engines, self._owned, strict=True):
                self._files.append(engine.open(owned.path, descriptor=owned.descriptor))
        except BaseException:
            self.close()
            raise

    def _own(self, index: int, directory: Path, size: int) -> OwnedFile:
        run = self.run
        try:
            if run is None:
                return create_owned(directory, self._rank, size)
            if run.found is not None:
                return adopt_owned(directory, run.data_name(index), size, run.found.sizes[index])
            return create_owned(directory, self._rank, size, f"{run.data_name(index)}.swap")
        except StorageError as error:
            if self.slots.nbytes and error.errno in NO_ROOM:
                raise self._two_slots(error) from error
            raise

    def _two_slots(self, error: StorageError) -> StorageError:
        """Return the error with a cause that users may not expect."""
        speculative = 'the update schedule "speculative" (see tiering.update_schedule, "deferred" needs one)'
        cause = speculative if self.run is None else "tiering.crash_consistent"
        return StorageError(
            error.errno or errno.ENOSPC,
            f"{error.strerror}; {cause} keeps two slots of what a step writes "
            f"({self.slots.nbytes} bytes so far, of rank {self._rank}), without it half of that is enough",
            str(error.filename),
            error.offset,
        )

    def register(self, span: Span) -> None:
        """Register memory that many requests will use, so that the kernel keeps it pinned."""
        for engine in dict.fromkeys(self._engines):
            engine.register(span)

    def read(self, extent: Extent | SlotExtent, span: Span, offset: int = 0, *, priority: Priority) -> IoFuture:
        """Start reading `span.nbytes` from `offset` within the extent; the newest version, if it is double-buffered."""
        if isinstance(extent, SlotExtent):
            return self.read_parts(extent.parts(extent.newest, span, offset), priority)
        read = together(
            [
                self._engines[piece.file].read(self._files[piece.file], piece.offset, part, priority)
                for piece, part in overlapping(extent, span, offset)
            ]
        )
        if self._checksums is None:
            return read
        return self._checksums[extent].verified(read, offset, span, partial(_locate, self.files(), extent))

    def read_parts(self, parts: Sequence[Part], priority: Priority) -> IoFuture:
        """Start reading these parts, as one request."""
        return together([self.read(part.extent, part.span, part.offset, priority=priority) for part in parts])

    def locate(self, extent: Extent | SlotExtent, nbytes: int) -> list[tuple[Path, int, int]]:
        """Return (file, offset, bytes) of each piece of the first `nbytes` of an extent."""
        span, files = Span(0, nbytes, None), self.files()
        parts = extent.parts(extent.newest, span, 0) if isinstance(extent, SlotExtent) else [Part(extent, span, 0)]
        return [place for part in parts for place in _locate(files, part.extent, part.offset, part.span.nbytes)]

    def write(self, extent: Extent | SlotExtent, span: Span, offset: int = 0) -> IoFuture:
        """Start writing `span` at `offset` within the extent. A double-buffered extent blocks until it may be written.

        Raises:
            Exception: the error that prevented the commit of the previous step, if the extent is double-buffered.
        """
        if isinstance(extent, SlotExtent):
            parts = self.slots.to_write(extent, span, offset)
            write = together([self.write(part.extent, part.span, part.offset) for part in parts])
            self.slots.opened(write)
            return write
        if self._checksums is not None:
            self._checksums[extent].written(offset, span)
        return together(
            [
                self._engines[piece.file].write(self._files[piece.file], piece.offset, part)
                for piece, part in overlapping(extent, span, offset)
            ]
        )

    def sync(self) -> None:
        """Flush all completed writes to the drives. Raises StorageError if a drive has failed."""
        for owned in self._owned:
            try:
                self.flush(owned.descriptor)
            except OSError as error:
                raise StorageError.of(error, "cannot flush what a step has written", owned.path) from error

    # A run that outlives the process #

    def adopt(self) -> None:
        """Continue from the step that an earlier process committed, if there is one, and discard its other steps.

        Raises:
            CheckpointError: it has another layout.
            StorageError: the record cannot be written.
        """
        if self.run is None or self.run.found is None:
            return
        found = self.run.found
        if found.layout != self.slots.layout():
            raise CheckpointError(
                f"{self.run.record_path} is of states that another version has laid out in another way: resume with "
                "that version, or from a checkpoint, and remove these states (infinity states remove)"
            )
        try:
            self.slots.adopt(found.generations[0].slots)
        except InfinityError as error:
            raise CheckpointError(
                f"{self.run.record_path} is damaged: of the slots of its step, {error}; resume from a checkpoint, and "
                "remove these states (infinity states remove)"
            ) from error
        # Before any slot is written. Otherwise, after a crash, ranks could agree on the older step, whose slots may
        # have been overwritten.
        self.run.write(found.stripes, found.sizes, found.layout, found.generations)

    def record(self, steps: Sequence[Generation]) -> None:
        """Commit: flush all writes, and record these steps, the newest first, as the ones to continue from.

        Raises:
            StorageError: a drive has failed, or has no room for the record.
        """
        assert self.run is not None
        self.sync()
        self.run.write(self._stripes, self._striping.sizes, self.slots.layout(), steps)
        if not self.run.kept:
            for index, owned in enumerate(self._owned):
                owned.keep(self.run.data_name(index))
            self.run.kept = True

    def discard_files(self) -> None:
        """End the run: its files are removed when they are closed."""
        if self.run is not None and self.run.kept:
            self.run.end()
            self.run.kept = False
            for owned in self._owned:
                owned.lose()

    def files(self) -> tuple[Path, ...]:
        return tuple(owned.path for owned in self._owned)

    def close(self) -> None:
        """Finish requests in flight, close the files, and remove the ones that are not kept."""
        for engine in self._engines:
            engine.close()
        for file in self._files:
            file.close()
        self._files.clear()
        for owned in self._owned:
            owned.remove()
        self._owned.clear()
        if self.run is not None:
            self.run.close()


# Requests over several drives #


def overlapping(extent: Extent, span: Span, offset: int) -> list[tuple[Piece, Span]]:
    """Return the ranges of the pieces that hold [offset, offset + span.nbytes), each with its part of `span`."""
    parts, start = [], 0
    for piece in extent.pieces:
        begin, end = max(offset, start), min(offset + span.nbytes, start + piece.nbytes)
        if begin < end:
            within = Piece(piece.file, piece.offset + begin - start, end - begin)
            parts.append((within, Span(span.address + begin - offset, end - begin, span.owner)))
        start += piece.nbytes
    return parts


def _locate(files: Sequence[Path], extent: Extent, offset: int, nbytes: int) -> list[tuple[Path, int, int]]:
    """Return (file, offset, bytes) of each piece of a range of an extent."""
    parts = overlapping(extent, Span(0, nbytes, None), offset)
    return [(files[piece.file], piece.offset, part.nbytes) for piece, part in parts]


# Drives #


def _drive(path: Path) -> int:
    """Return the number of the device that a directory is on."""
    try:
        return path.stat().st_dev
    except OSError as error:
        raise StorageError.of(error, "cannot use this nvme path", path, None) from error


def _capacity(path: NvmeConfig, alternatives: int) -> int:
    if path.capacity_bytes is not None:
        return path.capacity_bytes
    # With one directory, let `create` fail: it knows the total size.
    return disk_usage(path.path).free if alternatives > 1 else sys.maxsize


def _weights(paths: Sequence[NvmeConfig], drives: Sequence[int], options: IoOptions, backend: str) -> list[float]:
    """Return the bandwidth of every directory: as given, or measured if there is more than one drive."""
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
    options = replace(  # larger values are not more accurate, and take memory from the model
        options,
        block_size_bytes=min(options.block_size_bytes, _PROBE_BLOCK_BYTES),
        queue_depth=min(options.queue_depth, _PROBE_DEPTH),
    )
    size = max(16 * options.block_size_bytes, min(_PROBE_BYTES, disk_usage(directory).free // 8))
    with (
        random_memory(4 * options.block_size_bytes * options.queue_depth) as buffer,
        bench_file(directory, size) as file,
        BenchSession(file, size, backend, options, buffer) as session,
    ):
        session.fill()
        return session.run("mixed").bytes_per_s
