"""The exceptions of infinity, in one hierarchy."""

from __future__ import annotations

from errno import EIO
from pathlib import Path


class InfinityError(Exception):
    """Base of every error that infinity raises on purpose. The message says what to do."""


class ConfigError(InfinityError, ValueError):
    """A configuration key, value or combination that cannot work."""


class CapacityError(InfinityError):
    """A memory budget that is too small. The message has the number that is needed."""


class CheckpointError(InfinityError):
    """A checkpoint that is missing, damaged, or does not belong to this model."""


class RankError(InfinityError):
    """Another rank of this run has failed or stopped answering."""


class DivergedError(InfinityError):
    """The ranks of this run have exchanged values of different units."""


class NonFiniteError(InfinityError):
    """A loss or gradient that is NaN or infinite, if the step cannot be skipped for it."""


class UnscaledLossError(InfinityError, RuntimeError):
    """A backward pass in fp16 training whose loss was not scaled."""


class StorageError(InfinityError, OSError):
    """An input or output operation that failed.

    Attributes:
        errno: the operating system's error number.
        filename: path of the file or directory.
        offset: byte offset of the request that failed; None for a directory.
    """

    def __init__(self, errno: int, message: str, path: str, offset: int | None) -> None:
        OSError.__init__(self, errno, message, path)
        self.offset = offset

    @classmethod
    def of(cls, error: OSError, message: str, path: Path, offset: int | None = 0) -> StorageError:
        """Return the error for a system call that failed, with its number."""
        return cls(error.errno or EIO, message, str(path), offset)

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at offset {self.offset}"
        return f"[Errno {self.errno}] {self.strerror}: {self.filename!r}{where}"
