"""Parameters in existing safetensors files: read in place, and never written.

[Note: a unit in files]
Tensors begin at any offset of their files, and direct I/O reads whole blocks of 4 KiB. So the flat tensor of such a
unit is an *image*: the runs of file blocks that contain its parameters, one after another. A parameter keeps its offset
within its block; its first and last block may contain other bytes of the file. So a read puts parameters in place
without another copy, and a rank's shard of the image also consists of whole blocks.

A file stays open, so replacing the file under its name has no effect. Writes into it are detected: size and times of
the last change are checked after every read. A writer can reset the time of the content (`mtime`), but not the time of
the inode (`ctime`). `ctime` also changes when the file gets or loses a name, which is not a write.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infinity.errors import StorageError
from infinity.io import IoEngine, IoFile, IoFuture, IoStats, Priority, Span
from infinity.io.interface import together
from infinity.memory import ALIGN_BYTES, aligned
from infinity.tiers.checksums import Checked
from infinity.tiers.slots import Extent
from infinity.tiers.striping import Piece
from infinity.tiers.swap import overlapping


@dataclass(frozen=True)
class WeightFile:
    """The identity of a file when its header was read."""

    path: Path
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    names: int = 1

    @staticmethod
    def of(path: Path) -> WeightFile:
        """Return the file's present identity. Raises StorageError if it is missing."""
        try:
            return WeightFile.seen(path, path.stat())
        except OSError as error:
            raise StorageError.of(error, "cannot look at these weights", path) from error

    @staticmethod
    def seen(path: Path, found: os.stat_result) -> WeightFile:
        times = found.st_mtime_ns, found.st_ctime_ns
        return WeightFile(path, found.st_dev, found.st_ino, found.st_size, *times, found.st_nlink)

    def check(self, found: os.stat_result) -> None:
        """Check that the file is the same, and was not written since. Raises StorageError if the check failed."""
        now = WeightFile.seen(self.path, found)
        if now.names != self.names:
            now = replace(now, names=self.names, ctime_ns=self.ctime_ns)
        if now != self:
            raise StorageError(
                errno.ESTALE,
                "these weights have changed since their header was read, and are read in place: start again with files "
                "that no program writes, or read them with in_place=False",
                str(self.path),
                0,
            )


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        start, nbytes: its range in bytes.
    """

    file: WeightFile
    start: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True)
class FileRun:
    """Consecutive blocks of a file; the last of them may extend past its end."""

    file: WeightFile
    start: int
    nbytes: int


def lay_out_image(tensors: Sequence[StoredTensor]) -> tuple[list[int], tuple[FileRun, ...]]:
    """Lay out the image of these tensors, see [Note: a unit in files].

    Returns:
        The first byte of each tensor in the image, and the runs of the image.
    """
    starts = [0] * len(tensors)
    runs: list[FileRun] = []
    image_bytes = 0  # of the runs before the last
    for index in sorted(range(len(tensors)), key=lambda i: (str(tensors[i].file.path), tensors[i].start)):
        tensor = tensors[index]
        first = tensor.start // ALIGN_BYTES * ALIGN_BYTES
        end = aligned(tensor.start + tensor.nbytes)
        last = runs[-1] if runs else None
        if last is not None and last.file == tensor.file and first <= last.start + last.nbytes:
            runs[-1] = FileRun(last.file, last.start, max(end, last.start + last.nbytes) - last.start)
        else:
            image_bytes += 0 if last is None else last.nbytes
            runs.append(FileRun(tensor.file, first, end - first))
        starts[index] = image_bytes + tensor.start - runs[-1].start
    return starts, tuple(runs)


class WeightFiles:
    """Files of weights, open for reading, and the extents of units in them.

    Args:
        engine: reads the files, and is closed with this object; None if there are no files.
    """

    def __init__(self, engine: IoEngine | None = None) -> None:
        self._engine = engine
        self._index: dict[WeightFile, int] = {}
        self._files: list[_Opened] = []

    def add(self, runs: Sequence[FileRun], start: int, nbytes: int) -> Extent:
        """Return the extent of the part `[start, start + nbytes)` of an image, and open its files.

        Raises:
            StorageError: a file is missing, was replaced, or cannot be read in blocks.
        """
        pieces = tuple(Piece(self._open(run.file), run.start, run.nbytes) for run in runs)
        whole = Extent(pieces, sum(piece.nbytes for piece in pieces))
        part = Span(0, max(0, min(nbytes, whole.nbytes - start)), None)  # a unit may be padded beyond its image
        return Extent(tuple(piece for piece, _ in overlapping(whole, part, start)), part.nbytes)

    def _open(self, file: WeightFile) -> int:
        if file not in self._index:
            assert self._engine is not None
            self._files.append(_Opened(self._engine, file))
            self._index[file] = len(self._files) - 1
        return self._index[file]

    def read(self, extent: Extent, span: Span, offset: int = 0, *, priority: Priority) -> IoFuture:
        """Start reading an extent from `offset`, a block boundary, into `span`, which may extend past the extent."""
        reads: list[IoFuture] = []
        files: dict[int, _Opened] = {}
        nbytes = min(span.nbytes, extent.nbytes - offset)
        for piece, part in overlapping(extent, Span(span.address, nbytes, span.owner), offset):
            files[piece.file] = self._files[piece.file]
            reads += files[piece.file].read(piece, part, priority)

        def check() -> None:
            for file in files.values():
                file.check()

        return Checked(together(reads), check)

    def io_stats(self) -> IoStats | None:
        """Return the I/O counters; None without files."""
        return None if self._engine is None else self._engine.stats()

    def close(self) -> None:
        """Finish what is in flight, then close the files."""
        if self._engine is not None:
            self._engine.close()
        for file in self._files:
            file.close()
        self._files.clear()
        self._index.clear()


class _Opened:
    """One open file.

    Attributes:
        tail: the bytes after its last whole block, which direct I/O does not read.
    """

    def __init__(self, engine: IoEngine, file: WeightFile) -> None:
        self._engine = engine
        self._file = file
        self._blocks_end = file.size // ALIGN_BYTES * ALIGN_BYTES
        self._io: IoFile | None = None
        try:
            self._descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StorageError.of(error, "cannot open these weights", file.path) from error
        try:
            found = os.fstat(self._descriptor)
            file.check(found)
            if not stat.S_ISREG(found.st_mode):
                raise StorageError(errno.EINVAL, "these weights are no plain file", str(file.path), 0)
            self.tail = os.pread(self._descriptor, file.size - self._blocks_end, self._blocks_end)
            self._io = engine.open(file.path, read_only=True, descriptor=self._descriptor)
            if ALIGN_BYTES % self._io.alignment:
                raise StorageError(
                    errno.EINVAL,
                    f"this drive moves blocks of {self._io.alignment} bytes, and weights are read in place in "
                    f"blocks of {ALIGN_BYTES}: read them with in_place=False",
                    str(file.path),
                    0,
                )
        except BaseException:
            self.close()
            raise

    def read(self, piece: Piece, span: Span, priority: Priority) -> list[IoFuture]:
        """Start reading whole blocks; copy the bytes after the last whole block at once."""
        assert self._io is not None
        blocks = max(0, min(span.nbytes, self._blocks_end - piece.offset))
        if blocks < span.nbytes:
            ctypes.memmove(span.address + blocks, self.tail, len(self.tail))
        if not blocks:
            return []
        return [self._engine.read(self._io, piece.offset, Span(span.address, blocks, span.owner), priority)]

    def check(self) -> None:
        """Check that the file was not written; raises StorageError."""
        if self._descriptor >= 0:  # else it is closed, and the bytes are no longer used
            self._file.check(os.fstat(self._descriptor))

    def close(self) -> None:
        if self._io is not None:
            self._io.close()
            self._io = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
