"""The status file of a run, which `infinity top` reads: one per engine, replaced every second, removed at the end.

[Note: where the files are]
In a directory that belongs to the user, and to which no other user may write: below $XDG_RUNTIME_DIR if it is set, or
else in /dev/shm, which are both in memory; without them in /tmp, which may be on a drive. The system may remove such a
directory during the run, at the user's last logout. The next file is then written to the first usable directory.
Readers look in all directories.

[Note: who is alive]
A process that is killed leaves its file behind. The file therefore contains the process's number and start time; a
later process may get the same number, but not the same start time. Processes of another container have other numbers:
such a run counts as ended after `SILENT_S` without a new file.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.config.read import read_regular
from infinity.config.typed import Amount, Count, Positive, Real, parsed
from infinity.telemetry.tasks import read_task

PERIOD_S = 1.0
SILENT_S = 15.0  # without a new file: the interpreter is blocked, or the process is stopped
_KEPT_S = 120.0  # how long the file of a dead process is kept, so that users can see that it died
_VERSION = 1
_MOST_BYTES = 1 << 20
_END_S = 5.0  # how long to wait for the thread, which may hang in a filesystem

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


# Where #


def directories() -> list[Path]:
    """Return the directories for status files of this user, the best first; see [Note: where the files are]."""
    user = os.geteuid()
    given = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(given) / "infinity"] if given else []
    found += [Path(f"/run/user/{user}/infinity"), Path(f"/dev/shm/infinity-{user}"), Path(f"/tmp/infinity-{user}")]
    return list(dict.fromkeys(found))


def _is_private(directory: Path) -> bool:
    """Whether the directory belongs to this user, and no other user may write to it."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _made() -> Path:
    """Return the first usable directory, and create it if needed."""
    for directory in directories():
        with suppress(OSError):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            if _is_private(directory):
                return directory
    raise OSError("no directory for the status of runs")


# Writing #


class Publisher:
    """Writes the status of one engine from a thread, until `close`. Errors do not reach the training.

    Args:
        sample: returns the status as JSON values; called in the thread.
    """

    def __init__(self, sample: Callable[[], Mapping[str, Any]]) -> None:
        self._sample = sample
        self._owner = os.getpid()
        self._name = f"{self._owner}-{next(_numbers)}.json"
        self._self = {"version": _VERSION, "began_unix_s": time.time(), **_this_process()}
        self._path: Path | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="infinity-status", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left
            _log.info("infinity top will not see this run: %s", error)
            self._thread = None
            return
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread, and remove the file. Does nothing in a forked child: both belong to the parent."""
        if self._thread is None or os.getpid() != self._owner:
            return
        thread, self._thread = self._thread, None
        atexit.unregister(self.close)
        self._over.set()
        if thread is not threading.current_thread():  # the garbage collector may close an engine anywhere
            thread.join(_END_S)
        self._remove()

    def _run(self) -> None:
        with suppress(Exception):
            forget_ended()
        while True:
            try:
                self._write()
            except Exception as error:  # a disk error, or the engine changed during the sample
                _log.debug("the status of this run cannot be written: %s", error)
            if self._over.wait(PERIOD_S):
                self._remove()
                return

    def _write(self) -> None:
        text = json.dumps({**self._self, **self._sample(), "told_unix_s": time.time()})
        if self._path is None or not self._path.parent.is_dir():
            self._path = _made() / self._name
        new = self._path.with_suffix(".new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(self._path)

    def _remove(self) -> None:
        if self._path is not None:
            for path in (self._path, self._path.with_suffix(".new")):
                with suppress(OSError):
                    path.unlink()


def _this_process() -> dict[str, Any]:
    directory = ""
    with suppress(OSError):  # it may have been removed
        directory = _text(str(Path.cwd()))
    return {
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "namespace": _namespace(),
        "command": [_text(word) for word in (Path(sys.argv[0]).name, *sys.argv[1:])] if sys.argv else [],
        "directory": directory,
    }


def _text(word: str) -> str:
    """Return the word without surrogates: arguments and paths may contain bytes that are no text in JSON."""
    return word.encode("utf-8", "backslashreplace").decode()


def _started(pid: int) -> int | None:
    """Return when a process was started, in ticks since boot; None if it does not exist or has ended."""
    try:
        task = read_task(Path(f"/proc/{pid}"))
    except OSError:
        return None
    return None if task.state in "ZX" else task.started


def _namespace() -> int:
    """Return the number of the PID namespace, in which process numbers are unique; 0 if unknown."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


# Reading #


@dataclass(frozen=True)
class RunStatus:
    """The last status that an engine has written.

    Attributes:
        facts: the file's content.
        age_s: seconds since the file was written.
        alive: whether its process exists.
    """

    path: Path
    facts: Mapping[str, Any]
    age_s: float
    alive: bool

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    @property
    def silent(self) -> bool:
        """Whether the next status is overdue."""
        return self.age_s > SILENT_S


def read_runs(strange: list[str] | None = None) -> list[RunStatus]:
    """Return the status of all runs of this user on this machine, in the order they began; ended runs come last.

    Args:
        strange: receives a message for each file that is no status of a run.
    """
    runs = []
    for path in _files():
        try:
            runs.append(_read(path))
        except FileNotFoundError:
            pass  # it ended meanwhile
        except (OSError, ValueError) as error:
            if strange is not None:
                strange.append(f"{path} is no status of a run, and is left out: {error}")
    return sorted(runs, key=lambda run: (not run.alive, run.facts["began_unix_s"], run.pid))


def forget_ended() -> None:
    """Remove the files of processes that died more than `_KEPT_S` ago."""
    for run in read_runs():
        if not run.alive and run.age_s > _KEPT_S:
            with suppress(OSError):
                run.path.unlink()


def _files() -> Iterator[Path]:
    for directory in directories():
        with suppress(OSError):
            if _is_private(directory):
                yield from directory.glob("*.json")


def _read(path: Path) -> RunStatus:
    """Return the status in a file. Raises OSError and ValueError."""
    content = read_regular(path, _MOST_BYTES)
    age_s = max(0.0, time.time() - path.stat().st_mtime)
    if (version := parsed(_Version, content).version) != _VERSION:
        raise ValueError(f"it is of version {version}, and this infinity reads {_VERSION}")
    found = parsed(_Facts, content)
    here = found.namespace == _namespace()
    alive = _started(found.pid) == found.started if here else age_s < SILENT_S
    facts = {"command": [], "directory": "", **json.loads(content), "began_unix_s": found.began_unix_s}
    return RunStatus(path, facts, age_s, alive)


# Schema of a status file, see [Note: typed records] #


@dataclass(frozen=True)
class _Version:
    version: int


@dataclass(frozen=True)
class _Level:
    used_bytes: Count
    peak_bytes: Count
    capacity_bytes: Count


@dataclass(frozen=True)
class _Drive:
    paths: list[str]
    read_bytes_per_s: Real
    write_bytes_per_s: Real


@dataclass(frozen=True)
class _Flight:
    read_bytes: Count
    write_bytes: Count


@dataclass(frozen=True)
class _Waiting:
    cause: str
    for_s: Real


@dataclass(frozen=True)
class _Facts:
    """The fields that readers use."""

    pid: Positive
    namespace: int
    started: int | None
    began_unix_s: Real
    command: list[str] = field(default_factory=list)
    directory: str = ""
    rank: Count = 0
    ranks: Count = 1
    step: Count = 0
    steps: Real | None = None
    skipped_steps: Count = 0
    phase: str | None = None
    loss: Real | None = None
    lr: Real | None = None
    grad_norm: Real | None = None
    step_s: Real | None = None
    tokens_per_s: Real | None = None
    phase_s: dict[str, Amount] = field(default_factory=dict)
    stall_s: dict[str, Amount] = field(default_factory=dict)
    waiting: _Waiting | None = None
    tiers: dict[str, _Level] = field(default_factory=dict)
    drives: list[_Drive] = field(default_factory=list)
    in_flight: _Flight | None = None
