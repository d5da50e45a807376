"""The files of a run that outlive its processes: find them, take them over, and remove them when the run has ended.

A rank's states are in `infinity-<run>-r<rank>-d<index>.slots`, one file in each of its directories. Its record (see
records.py) is `infinity-<run>-r<rank>.record` in the first directory. Before the first finished step, the files of
states have names of swap files (`.slots.swap`), and the next start removes them. They are renamed after the first
record is written. So a first record without files of states belongs to an interrupted commit. A living process holds a
lock on its files of states, under either name.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import CheckpointError, StorageError
from infinity.io.directory import check_private, create_private, foreign, sync_directory
from infinity.tiers.records import MOST_BYTES, Generation, Record, parse_record
from infinity.tiers.striping import Stripe
from infinity.tiers.swap_file import open_swap_directory, swap_directory

_NAME = re.compile(
    r"infinity-(?P<run>[0-9a-f]{8,64})-r(?P<rank>\d{1,9})(?:-d\d{1,4}\.slots(?:\.swap)?|\.record(?:\.new)?)"
)


@dataclass(frozen=True)
class KeptFile:
    """A file of a run that outlives its process.

    Attributes:
        foreign: why another user may have created it; None if it certainly belongs to this user.
    """

    path: Path
    run: str
    rank: int
    foreign: str | None = None

    @property
    def is_record(self) -> bool:
        return self.path.suffix == ".record"

    @property
    def is_data(self) -> bool:
        return self.path.suffix in (".slots", ".swap")

    @property
    def is_unfinished(self) -> bool:
        """Whether no run can continue from it: an incomplete record, or states before the first record."""
        return self.path.suffix in (".new", ".swap")


def kept_files(directory: Path) -> list[KeptFile]:
    """Return the files of runs in a directory, sorted by name. Raises StorageError if the directory cannot be used."""
    found = []
    with swap_directory(directory, "states", lasting=True) as (descriptor, names):
        for name in names:
            if match := _NAME.fullmatch(name):
                with suppress(FileNotFoundError):  # removed just now
                    why = foreign(os.stat(name, dir_fd=descriptor, follow_symlinks=False))
                    found.append(KeptFile(directory / name, match["run"], int(match["rank"]), why))
    return found


def read_record(path: Path) -> Record:
    """Read a record. Raises CheckpointError if it is damaged, or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            check_private(descriptor)
            record = parse_record(path, file.read(MOST_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    named = _NAME.fullmatch(path.name)
    if named is not None and (record.run, record.rank) != (named["run"], int(named["rank"])):
        raise CheckpointError(
            f"{path} is the record of rank {record.rank} of run {record.run}: give it its name back, or remove these "
            f"states (infinity states remove {path.parent})"
        )
    return record


def find_record(directories: Sequence[Path], rank: int) -> Record | None:
    """Return the record that this rank can continue from; None if there is none. Remove unfinished files.

    Raises:
        CheckpointError: there are several runs, states without a record, missing states, or a damaged record; or a
            living process uses the files, or another user may have created them.
    """
    files = [file for path in dict.fromkeys(directories) for file in kept_files(path) if file.rank == rank]
    files = [file for file in files if not (file.is_unfinished and file.foreign)]  # no run continues from these
    for file in files:
        if file.foreign:
            raise CheckpointError(
                f"{file.path} is refused: {file.foreign}. If its content can be trusted, make it your own (a copy with "
                "mode 600); otherwise remove it, or give the run a directory of its own"
            )
    check_unlocked(files)
    remove([file for file in files if file.is_unfinished])
    files = [file for file in files if not file.is_unfinished]
    records = [file for file in files if file.is_record and file.path.parent == directories[0]]
    runs = sorted({file.run for file in files})
    if len(runs) > 1:
        raise CheckpointError(
            f"{directories[0]} has the states of several runs ({', '.join(runs)}), and tiering.crash_consistent keeps "
            "one in a directory: remove the others (infinity states list, infinity states remove --run)"
        )
    if files and not records:
        raise CheckpointError(
            f"{files[0].path} is of a run whose record is not in {directories[0]}, so its step is unknown: give the "
            "paths in the order that the run had, or remove it (infinity states remove)"
        )
    if not records:
        return None
    record = read_record(records[0].path)
    ended = not record.generations  # the run had ended, and was killed while it removed its files
    missing = missing_states(record, directories)
    if missing and not ended and record.generations[0].sequence > 1:
        raise CheckpointError(
            f"{missing[0]} is missing, of the states that {records[0].path} describes: give all paths in the order "
            "that the run had, or resume from a checkpoint and remove these states (infinity states remove)"
        )
    if missing or ended:
        remove(files)
        return None
    return record


def missing_states(record: Record, directories: Sequence[Path]) -> list[Path]:
    """Return the files of states that a record describes and that are not in these directories."""
    wanted = [path / data_name(record.run, record.rank, index) for index, path in enumerate(directories)]
    return [path for path in wanted if not os.path.lexists(path)]


def flush_names(directories: Sequence[Path]) -> None:
    """Flush the names of the files in these directories to the drives. Raises StorageError if a drive has failed."""
    for path in dict.fromkeys(directories):
        try:
            sync_directory(path)
        except OSError as error:
            raise StorageError.of(error, "cannot flush the names of states", path) from error


def remove(files: Sequence[KeptFile]) -> None:
    """Remove a dead run's files, except files of other users. After a crash, a removed file stays removed.

    Raises:
        CheckpointError: a living process uses one of them.
        StorageError: a drive has failed.
    """
    own = [file for file in files if file.foreign is None]
    check_unlocked(own)
    for records in (False, True):  # the record last, because states without a record are refused
        chosen = [file for file in own if file.is_record == records]
        for file in chosen:
            file.path.unlink(missing_ok=True)
        flush_names([file.path.parent for file in chosen])


def check_unlocked(files: Sequence[KeptFile]) -> None:
    """Raise CheckpointError if a living process uses one of these files."""
    for file in files:
        if file.is_data and is_locked(file.path):
            raise CheckpointError(
                f"{file.path} is in use: a living process trains run {file.run} with it. End that one first, or give "
                "each run a directory of its own"
            )


def data_name(run: str, rank: int, index: int) -> str:
    """Return the name of a rank's states in its directory of this index."""
    return f"infinity-{run}-r{rank}-d{index}.slots"


@dataclass(eq=False)
class RunFiles:
    """The files of one rank of a run.

    Attributes:
        id: the name of the run; if `found` is given, the name in it.
        nonce: identifies this start of the run; equal on all ranks.
        directory: the first one, which has the record.
        facts: see `Record`.
        found: the record of an earlier process, with the one generation that the ranks agreed on.
        kept: whether there are files that outlive this process.
    """

    id: str
    nonce: str
    rank: int
    ranks: int
    directory: Path
    facts: Mapping[str, Mapping[str, Any]]
    found: Record | None = None

    def __post_init__(self) -> None:
        self.kept = self.found is not None
        self._descriptor: int | None = None
        self._ended = False

    @property
    def record_path(self) -> Path:
        return self.directory / f"infinity-{self.id}-r{self.rank}.record"

    def data_name(self, index: int) -> str:
        """Return the name of the states in the directory of this index."""
        return data_name(self.id, self.rank, index)

    def write(self, stripes: Sequence[Stripe], sizes: Sequence[int], layout: str, steps: Sequence[Generation]) -> None:
        """Replace the record. The states that it describes must be flushed.

        Raises:
            StorageError: it cannot be written; the old record is intact.
        """
        record = Record(self.id, self.rank, self.ranks, self.facts, stripes, sizes, layout, steps)
        try:
            self._replace(record.to_bytes())
        except OSError as error:
            why = f"cannot write the record of a finished step ({error.strerror})"
            raise StorageError.of(error, why, self.record_path) from error

    def _replace(self, content: bytes) -> None:
        """Write and flush a new file, and rename it to the record; raises OSError."""
        if self._descriptor is None:
            self._descriptor = open_swap_directory(self.directory, lasting=True)
        name, new = self.record_path.name, self.record_path.name + ".new"
        with suppress(FileNotFoundError):
            why = foreign(os.stat(new, dir_fd=self._descriptor, follow_symlinks=False))
            if why is not None:
                raise OSError(errno.EPERM, f"{new} is in the way, and is not removed: {why}")
            os.unlink(new, dir_fd=self._descriptor)
        with os.fdopen(create_private(new, self._descriptor), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        os.fsync(self._descriptor)

    def end(self) -> None:
        """Replace the record by an empty one, so that no process continues from the run; raises like `write`."""
        self.write((), (), "", ())
        self._ended = True

    def close(self) -> None:
        """Close the directory. If the run has ended, remove the record; its states are removed already."""
        if self._ended:
            self.record_path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(path: Path) -> bool:
    """Whether a living process uses this file. Raises CheckpointError if this cannot be determined."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            check_private(descriptor)  # another user could hold a lock for ever
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False  # just removed
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be locked ({error.strerror}), so it is unknown whether a living process uses it; "
            "tiering.crash_consistent needs a filesystem with locks"
        ) from error
    return False
