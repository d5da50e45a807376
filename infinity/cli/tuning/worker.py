"""Processes that measure the machine, or a few steps of training, for `infinity tune`.

A parent process has loaded all libraries, but used none of them. It reads jobs from standard input, one JSON object a
line, and forks a child for each. Events go to standard output, also one JSON object a line. Those of the parent are
`{"event": "began", "pid"}` and `{"event": "ended", "code"}`; those of the child, between them,
`{"event": "doing", "what"}`, `{"event": "machine", "found"}`, `{"event": "ready", "init_s"}`,
`{"event": "step", "step_s", "counts", ...}` and `{"event": "error", "error"}`.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers

from infinity.cli.training.models import build_model, checkpoint_activations
from infinity.engine import Engine
from infinity.errors import InfinityError
from infinity.setup import initialize
from infinity.tuning import MachineJob, measure_machine

_MOST_STEPS = 50


def main() -> int:
    """Serve jobs until standard input ends. Return the exit code."""
    for line in iter(sys.stdin.readline, ""):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(line)
        _say("began", pid=pid)
        _, status = os.waitpid(pid, 0)
        _say("ended", code=os.waitstatus_to_exitcode(status))
    return 0


def _become(line: str) -> NoReturn:
    """Do one job in a forked child, and end the process with its exit code."""
    try:
        code = perform(json.loads(line))
    except SystemExit as ending:
        code = int(ending.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # removes swap files; `os._exit` does not call them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a child must not continue the loop of the parent


def perform(job: dict[str, Any]) -> int:
    """Do one job. Return the exit code."""
    try:
        if job["kind"] == "machine":
            _measure(job)
        else:
            _train(job)
    except InfinityError as error:
        _say("error", error=str(error))
        return 1
    except Exception as error:  # from torch or the model: this setting fails, but the search continues
        _say("error", error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def _measure(job: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in job["machine"].items()
    }
    _say("machine", found=measure_machine(MachineJob(**asked), lambda what: _say("doing", what=what), job["profile"]))


def _train(job: dict[str, Any]) -> None:
    """Train on random tokens until enough steps are measured."""
    parent = os.getppid()
    transformers.logging.set_verbosity_error()
    start_s = time.perf_counter()
    torch.manual_seed(0)
    model, weights = build_model(job["model"])
    if job["checkpointing"]:
        checkpoint_activations(model)
    kinds = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    engine, *_ = initialize(model=model, config=job["values"], weights=weights, device=job["device"])
    del model
    with engine:
        size = engine.config.micro_batch_size
        ids = torch.randint(0, kinds, (size, job["seq_len"])).to(engine.device)
        batches = [{"input_ids": ids, "labels": ids}] * engine.config.gradient_accumulation_steps
        _say("ready", init_s=time.perf_counter() - start_s)
        count, written = _Count(job["warm_up"], job["steps"], job["least_s"], job["most_s"]), 0
        while not count.enough and os.getppid() == parent:
            start_s = time.perf_counter()
            engine.train_batch(iter(batches))
            step_s = time.perf_counter() - start_s
            # A step that updates nothing is too short to count.
            counts = not engine.stats().skipped and count.take(step_s)
            written += engine.stats().tier_bytes.get("nvme_write", 0)
            _say("step", step_s=step_s, counts=counts, **_peaks(engine, written))


@dataclass
class _Count:
    """Decides which steps count, and when there are enough.

    Args:
        warm_up: steps that do not count; if they exceed `most_s`, fewer, but at least one.
        steps: least number of counted steps, which also last at least `least_s`; if they exceed `most_s`, fewer, but
            at least one.
    """

    warm_up: int
    steps: int
    least_s: float
    most_s: float
    seen: int = 0
    counted: int = 0
    warm_s: float = 0.0
    counted_s: float = 0.0

    def take(self, step_s: float) -> bool:
        """Take the seconds of a step. Return whether it counts."""
        self.seen += 1
        if self.seen <= self.warm_up and (self.seen == 1 or self.warm_s < self.most_s):
            self.warm_s += step_s
            return False
        self.counted += 1
        self.counted_s += step_s
        return True

    @property
    def enough(self) -> bool:
        long = self.counted >= self.steps and self.counted_s >= self.least_s
        return long or self.counted >= _MOST_STEPS or (self.counted > 0 and self.counted_s >= self.most_s)


def _peaks(engine: Engine, written: int) -> dict[str, int]:
    peaks = engine.stats().peak_bytes
    return {
        "peak_host_bytes": peaks.get("host", 0),
        "peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "written_bytes": written + peaks.get("nvme", 0),
    }
