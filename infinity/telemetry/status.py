"""What a run tells others on its machine: one small file an engine, replaced once a second, removed at the end.

[Note: where the files are]
In a directory of the user's own, which nobody else may write to, on the machine that the run is on: below
$XDG_RUNTIME_DIR where there is one, or else in /dev/shm, which are memory both; without them in /tmp, maybe on a drive.
Such a directory may go while the run goes on (the last login has ended): the next file is written where there is one
then. Who reads looks at all of them.

[Note: who is alive]
A process that is killed leaves its file. So the file has the process's number with the moment it was started, which no
later process of that number shares. A process of another container has another numbering: there, what has been silent
for long counts as ended.
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
SILENT_S = 15.0  # without a word: the interpreter is held up, or the process stopped
_KEPT_S = 120.0  # the file of a process that has gone, so that somebody may find out
_VERSION = 1
_MOST_BYTES = 1 << 20
_END_S = 5.0  # for a thread to end that hangs in a filesystem

_log = logging.getLogger(__name__)
_numbers = itertools.count(1)


# Where #


def directories() -> list[Path]:
    """Where this user's runs may have their files, the best first; see [Note: where the files are]."""
    user = os.geteuid()
    given = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(given) / "infinity"] if given else []
    found += [Path(f"/run/user/{user}/infinity"), Path(f"/dev/shm/infinity-{user}"), Path(f"/tmp/infinity-{user}")]
    return list(dict.fromkeys(found))


def _is_private(directory: Path) -> bool:
    """It is this user's, and nobody else may write there."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _made() -> Path:
    """The first directory that can be used."""
    for directory in directories():
        with suppress(OSError):
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)
            if _is_private(directory):
                return directory
    raise OSError("no directory for the status of runs")


# Writing #


class Publisher:
    """Tells what one engine does, from a thread, until it is closed. Whatever fails here, training goes on.

    Args:
        sample: what is to be told, as JSON has it; called in the thread.
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
        except RuntimeError as error:  # no thread is to be had
            _log.info("infinity top will not see this run: %s", error)
            self._thread = None
            return
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread, and remove the file. A forked child leaves both to its parent."""
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
                self._tell()
            except Exception as error:  # of a disk, or of an engine that changes while it is looked at
                _log.debug("the status of this run is not told: %s", error)
            if self._over.wait(PERIOD_S):
                self._remove()
                return

    def _tell(self) -> None:
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
    """Arguments and paths may be any bytes, which JSON has no text for."""
    return word.encode("utf-8", "backslashreplace").decode()


def _started(pid: int) -> int | None:
    """When a process was started, in ticks since the machine was; None if there is none."""
    try:
        task = read_task(Path(f"/proc/{pid}"))
    except OSError:
        return None
    return None if task.state in "ZX" else task.started


def _namespace() -> int:
    """Processes have their numbers within it."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


# Reading #


@dataclass(frozen=True)
class RunStatus:
    """What an engine has told last.

    Attributes:
        facts: as they were told.
        age_s: since then.
        alive: its process is there.
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
        """It should have told something since."""
        return self.age_s > SILENT_S


def read_runs(strange: list[str] | None = None) -> list[RunStatus]:
    """All runs of this user on this machine that have a file, in the order they began; the ended ones last.

    Args:
        strange: gets a line for each file that is something else than a run's.
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
    """Remove files whose processes have ended without a word a while ago."""
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
    """A file's run; raises OSError and ValueError."""
    content = read_regular(path, _MOST_BYTES)
    age_s = max(0.0, time.time() - path.stat().st_mtime)
    if (version := parsed(_Version, content).version) != _VERSION:
        raise ValueError(f"it is of version {version}, and this infinity reads {_VERSION}")
    found = parsed(_Facts, content)
    here = found.namespace == _namespace()
    alive = _started(found.pid) == found.started if here else age_s < SILENT_S
    facts = {"command": [], "directory": "", **json.loads(content), "began_unix_s": found.began_unix_s}
    return RunStatus(path, facts, age_s, alive)


# What a file may hold, see [Note: typed records] #


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
    """What readers of a status look at."""

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
