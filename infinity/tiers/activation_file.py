"""Space for activations on the drives: files that grow, because only the first step shows how much is needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.errors import StorageError
from infinity.io import IoEngine, IoFuture, IoStats, Priority, Span
from infinity.io.directory import allocate, how_to_grow
from infinity.memory import FreeList
from infinity.tiers.checksums import Checksums
from infinity.tiers.striping import Piece
from infinity.tiers.swap_file import create_owned

_GROWTH_BYTES = 64 << 20


class ActivationFiles:
    """One file in each directory. Successive tensors go to successive files.

    Args:
        engine: closed with the files.
        checksum: verify every read against the checksum of the write.
    """

    def __init__(self, engine: IoEngine, directories: Sequence[Path], rank: int, *, checksum: bool) -> None:
        self._engine = engine
        self._checksums: dict[Piece, Checksums] | None = {} if checksum else None
        self._files = [_File(engine, directory, rank) for directory in directories]
        self._turn = 0

    def take(self, nbytes: int) -> Piece:
        """Reserve an aligned number of bytes. Raises StorageError if the drive is full."""
        self._turn = (self._turn + 1) % len(self._files)
        return Piece(self._turn, self._files[self._turn].take(nbytes), nbytes)

    def give(self, place: Piece) -> None:
        """Release the space for another tensor."""
        self._files[place.file].free.give(place.offset, place.nbytes)

    def write(self, place: Piece, span: Span) -> IoFuture:
        if self._checksums is not None:
            self._checksums[place] = Checksums()
            self._checksums[place].written(0, span)
        return self._engine.write(self._files[place.file].file, place.offset, span)

    def read(self, place: Piece, span: Span, priority: Priority) -> IoFuture:
        file = self._files[place.file].file
        read = self._engine.read(file, place.offset, span, priority)
        if self._checksums is None:
            return read

        def locate(offset: int, nbytes: int) -> list[tuple[Path, int, int]]:
            return [(file.path, place.offset + offset, nbytes)]

        return self._checksums[place].verified(read, 0, span, locate)

    def io_stats(self) -> IoStats:
        return self._engine.stats()

    def close(self) -> None:
        """Finish requests in flight, and remove the files."""
        self._engine.close()
        for file in self._files:
            file.file.close()
            file.owned.remove()


class _File:
    def __init__(self, engine: IoEngine, directory: Path, rank: int) -> None:
        self.owned = create_owned(directory, rank, 0)
        self.file = engine.open(self.owned.path, descriptor=self.owned.descriptor)
        self.free = FreeList(0)
        self._size = 0

    def take(self, nbytes: int) -> int:
        offset = self.free.take(nbytes)
        if offset is None:
            self._grow(max(nbytes, _GROWTH_BYTES))
            offset = self.free.take(nbytes)
            assert offset is not None
        return offset

    def _grow(self, nbytes: int) -> None:
        try:
            allocate(self.owned.descriptor, nbytes, self._size)
        except OSError as error:
            raise StorageError.of(
                error,
                f"cannot reserve {nbytes} bytes more for activations ({error.strerror}): "
                f"{how_to_grow(error)}, or choose another nvme path",
                self.owned.path,
                self._size,
            ) from error
        self.free.give(self._size, nbytes)
        self._size += nbytes
