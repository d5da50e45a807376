"""Starts the processes that measure, reads their events, and stops those that cannot win any more."""

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
_ENDS_IN_S = 20.0  # time for a process to remove its swap files after SIGTERM
_TICK_S = 0.25
_FAR_TOO_SLOW = 3.0  # a run is stopped if a step, even of the warm-up, takes so many times the limit
_TAIL_CHARS = 2000


@dataclass(frozen=True)
class TrialJob:
    """The common settings of all trials.

    Attributes:
        warm_up: steps before the measured ones.
        steps: least number of measured steps, which also last at least `least_s`; fewer if they exceed `most_s`.
        tick: called regularly while a trial runs, with its step times so far.
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
    """Call `measure_machine` in a process of its own, and return its result.

    Raises:
        InfinityError: the measurement failed.
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
        """Measure a setting, see `infinity.tuning.Search`. Errors are returned in the run."""
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
    """Return the configuration without learning-rate schedule and timeline, which a few steps do not need."""
    left = {key: value for key, value in values.items() if key not in ("scheduler", "tiering.timeline")}
    if isinstance(left.get("tiering"), dict):
        left["tiering"] = {key: value for key, value in left["tiering"].items() if key != "timeline"}
    return left


@dataclass
class _Heard:
    """The events of a training process so far."""

    init_s: float = 0.0
    stopped: bool = False
    step_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    peaks: dict[str, int] = field(default_factory=dict)
    _seen: int = 0  # steps, including the warm-up

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
        """Whether even the fastest of several steps is too slow."""
        slow = len(self.step_s) >= 2 and min(self.step_s) > stop_above_s
        return slow or (self._seen >= 2 and self.last_s > _FAR_TOO_SLOW * stop_above_s)


class Workers:
    """A process that has loaded all libraries of a training, and forks a child for each job. A context manager.

    Loading takes seconds, which would be most of a trial of a small model. The process starts with the first job. It
    has its own session, so that Ctrl-C reaches only this process.
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
        """Run a job in a child process, which is ended at the end of the context."""
        if self._process is not None and self._process.poll() is not None:
            _end(self._process)
            self._process = None
        began_at = self._errors.seek(0, os.SEEK_END)  # before the job starts: it may fail and print at once
        self._process = self._process or self._start()
        assert self._process.stdin is not None  # opened as a pipe
        with suppress(BrokenPipeError):  # the process has ended; its exit code is handled later
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
            encoding="utf-8",
            errors="replace",  # a library may print any bytes; an error would end the thread that reads them
            start_new_session=True,
            # Otherwise, looking for a GPU would initialize CUDA in the parent, and forked children could not use it.
            env=os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        )
        said: queue.Queue[str | None] = queue.Queue()
        self._said = said

        def hear() -> None:
            assert process.stdout is not None  # opened as a pipe
            with process.stdout:
                for line in process.stdout:
                    said.put(line)
            said.put(None)

        threading.Thread(target=hear, name="infinity-tune", daemon=True).start()
        return process


class _Worker:
    """The child process of one job, and its events.

    Args:
        began_at: position in `errors` at which the output of this job begins.
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
        """Yield its events until it ends, and an empty event every `_TICK_S` without one."""
        while self._code is None:
            event = self._next(_TICK_S)
            if event is not None:
                yield event

    def _next(self, within_s: float) -> dict[str, Any] | None:
        """Return the next event, an empty one after a timeout, or None for an event that only this class handles."""
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
        """End the process: first by SIGTERM, so that it removes its swap files, then by SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until_s = time.monotonic() + _ENDS_IN_S
            asked = False
            while self._code is None and time.monotonic() < until_s:
                if self._pid and not asked:
                    asked = True
                    with suppress(ProcessLookupError):
                        os.kill(self._pid, number)
                self._next(_TICK_S)
        if self._code is None:  # the parent does not report the end of the child: it hangs, too
            self._parent.kill()

    @property
    def error(self) -> str:
        """Why it failed; empty if it did not."""
        if self._told or not self._code:
            return self._told
        if self._code == -signal.SIGKILL:
            return "it was killed by the system, usually because memory ran out"
        self._errors.seek(self._began_at)
        tail = self._errors.read()[-_TAIL_CHARS:].strip()
        return f"it ended with {self._code}: {tail.splitlines()[-1] if tail else 'without output'}"


def _event(line: str) -> dict[str, Any]:
    """Return the event in a line; empty if the line is a library's output."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "event" in found else {}


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None  # opened as a pipe
    with suppress(BrokenPipeError):
        process.stdin.close()  # the worker ends at the end of its input
    try:
        process.wait(_ENDS_IN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
