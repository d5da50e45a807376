"""Starts the processes that measure, listens to them, and ends those that have said enough."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from infinity.cli.launch import __file__ as _LAUNCH
from infinity.errors import InfinityError
from infinity.tuning import MachineJob, Outlook, Run, Setting

_SCRIPT = Path(_LAUNCH).parent / "trial.py"
_ENDS_IN_S = 20.0  # a process that is asked to end removes its swap files
_TICK_S = 0.25
_FAR_TOO_SLOW = 3.0  # of the limit: not even a step to warm up may take so long
_TAIL_CHARS = 2000


@dataclass(frozen=True)
class TrialJob:
    """What all trials have alike.

    Attributes:
        warm_up: steps before those that count.
        steps: that count at least, and for at least `least_s`; fewer where they take longer than `most_s`.
        tick: called every now and then while a trial runs, with its step times so far.
    """

    model: str
    seq_len: int
    checkpointing: bool
    device: str | None
    steps: int
    warm_up: int = 2
    least_s: float = 2.0
    most_s: float = 60.0
    tick: Callable[[list[float]], None] = lambda seconds: None


def measure_in_process(
    workers: Workers, machine: MachineJob, profile: dict[str, Any] | None, doing: Callable[[str], None]
) -> dict[str, Any]:
    """What `measure_machine` finds, of a process of its own.

    Raises:
        InfinityError: it failed.
    """
    with workers.at({"kind": "machine", "machine": asdict(machine), "profile": profile}) as worker:
        for event in worker.listen():
            if event.get("event") == "doing":
                doing(event["what"])
            elif event.get("event") == "machine":
                return dict(event["found"])
    raise InfinityError(f"this machine could not be measured: {worker.error}")


class Trials:
    """Trains a few steps with a setting, in a process of its own."""

    def __init__(self, workers: Workers, outlook: Outlook, job: TrialJob) -> None:
        self._workers = workers
        self._outlook = outlook
        self._job = job

    def measure(self, setting: Setting, stop_above_s: float, within_s: float) -> Run:
        """See `infinity.tuning.Search`; whatever fails is told in the run."""
        began_s = time.monotonic()
        job = {name: value for name, value in vars(self._job).items() if name != "tick"}
        job |= {"kind": "train", "values": _for_a_trial(self._outlook.values_of(setting))}
        heard = _Heard()
        with self._workers.at(job) as worker:
            for event in worker.listen():
                heard.take(event)
                self._job.tick(heard.step_s)
                late = time.monotonic() - began_s > within_s
                if late or heard.hopeless(stop_above_s):
                    heard.stopped = True
                    break
        error = "" if heard.stopped else worker.error
        return Run(
            setting,
            tuple(heard.step_s),
            init_s=heard.init_s,
            took_s=time.monotonic() - began_s,
            stopped=heard.stopped,
            error=error,
            **heard.peaks,
        )


def _for_a_trial(values: dict[str, Any]) -> dict[str, Any]:
    """Without what a few steps neither need nor should leave behind: a learning-rate schedule, a timeline."""
    left = {key: value for key, value in values.items() if key not in ("scheduler", "tiering.timeline")}
    if isinstance(left.get("tiering"), dict):
        left["tiering"] = {key: value for key, value in left["tiering"].items() if key != "timeline"}
    return left


@dataclass
class _Heard:
    """What a training process has said so far."""

    init_s: float = 0.0
    stopped: bool = False
    step_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    peaks: dict[str, int] = field(default_factory=dict)
    _seen: int = 0  # steps, those to warm up included

    def take(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ready":
            self.init_s = float(event["init_s"])
        if event.get("event") != "step":
            return
        self.last_s = float(event["step_s"])
        self.peaks = {name: int(value) for name, value in event.items() if name.endswith("_bytes")}
        self._seen += 1
        if event["counts"]:
            self.step_s.append(self.last_s)

    def hopeless(self, stop_above_s: float) -> bool:
        """Even the fastest of several steps is too slow."""
        slow = len(self.step_s) >= 2 and min(self.step_s) > stop_above_s
        return slow or (self._seen >= 2 and self.last_s > _FAR_TOO_SLOW * stop_above_s)


class Workers:
    """A process that has loaded what training takes, and forks one for each job; a context manager.

    Loading takes seconds, which for a small model would be most of a trial. It begins with the first job. The process
    is in a session of its own, so that Ctrl-C is ours alone.
    """

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (`close`)
        self._process: subprocess.Popen[str] | None = None
        self._said: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _end(self._process)
        self._errors.close()

    @contextmanager
    def at(self, job: dict[str, Any]) -> Iterator[_Worker]:
        """A process that does this job; it ends with the block."""
        if self._process is not None and self._process.poll() is not None:
            _end(self._process)
            self._process = None
        began_at = self._errors.seek(0, os.SEEK_END)  # before the job: a process that fails at once says why at once
        self._process = self._process or self._start()
        assert self._process.stdin is not None  # it was asked for
        with suppress(BrokenPipeError):  # it has ended meanwhile, and its exit code says so
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        worker = _Worker(self._process, self._said, self._errors, began_at)
        try:
            yield worker
        finally:
            worker.end()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            # Or asking for a GPU would start CUDA in the parent, which no process that it forks could use then.
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        said: queue.Queue[str | None] = queue.Queue()
        self._said = said

        def hear() -> None:
            assert process.stdout is not None  # it was asked for
            with process.stdout:
                for line in process.stdout:
                    said.put(line)
            said.put(None)

        threading.Thread(target=hear, name="infinity-tune", daemon=True).start()
        return process


class _Worker:
    """One job's process, and what it says.

    Args:
        began_at: where in `errors` the words of this job begin.
    """

    def __init__(
        self, parent: subprocess.Popen[str], said: queue.Queue[str | None], errors: IO[str], began_at: int
    ) -> None:
        self._parent = parent
        self._said = said
        self._errors = errors
        self._began_at = began_at
        self._told = ""
        self._pid = 0
        self._code: int | None = None

    def listen(self) -> Iterator[dict[str, Any]]:
        """Its events until it ends; an empty one now and then while it says nothing."""
        while self._code is None:
            event = self._next(_TICK_S)
            if event is not None:
                yield event

    def _next(self, within_s: float) -> dict[str, Any] | None:
        """What it says next, or nothing; None where that is for us alone."""
        try:
            line = self._said.get(timeout=within_s)
        except queue.Empty:
            return {}
        if line is None:
            self._code = self._parent.wait() or 1
            return None
        event = _event(line)
        if event.get("event") == "began":
            self._pid = int(event["pid"])
        elif event.get("event") == "ended":
            self._code = int(event["code"])
        elif event.get("event") == "error":
            self._told = str(event["error"])
        else:
            return event
        return None

    def end(self) -> None:
        """Have it end, if it has not; it removes its swap files first, if it is given the time."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + _ENDS_IN_S
            asked = False
            while self._code is None and time.monotonic() < until_s:
                if self._pid and not asked:
                    asked = True
                    with suppress(ProcessLookupError):
                        os.kill(self._pid, number)
                self._next(_TICK_S)
        if self._code is None:  # nobody there to say that it ended
            self._parent.kill()

    @property
    def error(self) -> str:
        """Why it failed; empty if it did not."""
        if self._told or not self._code:
            return self._told
        if self._code == -signal.SIGKILL:
            return "it was killed by the system, as a rule for want of memory"
        self._errors.seek(self._began_at)
        tail = self._errors.read()[-_TAIL_CHARS:].strip()
        return f"it ended with {self._code}: {tail.splitlines()[-1] if tail else 'without a word'}"


def _event(line: str) -> dict[str, Any]:
    """What a line says; nothing if it is a library's."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "event" in found else {}


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None  # it was asked for
    with suppress(BrokenPipeError):
        process.stdin.close()  # it ends where there are no more jobs
    try:
        process.wait(_ENDS_IN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
