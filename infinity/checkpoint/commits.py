"""Commit every finished step on NVMe in the background, and resume from the last committed step after a crash.

[Note: commits]
A step is *over* when `step()` returns, though some of its updates may still run during the next forward pass. The state
outside of the tiers (counters, schedule, random states, the client's state) is collected at that moment. When the last
update is computed, the step's epoch is closed (see slots.py). The commit thread then waits for the writes, flushes the
drives, writes the record, and notifies the other ranks. Meanwhile the next step computes; its first write waits for the
records of all ranks. So one rank is at most one commit ahead of another, and two slots are enough.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from infinity.checkpoint.codes import CodeSums
from infinity.checkpoint.extra import Parts, TrainingState, unpacked
from infinity.checkpoint.save import serialise
from infinity.errors import CheckpointError, InfinityError, RankError
from infinity.io import IoFuture
from infinity.io.threads import start_thread
from infinity.tiers.records import Generation
from infinity.tiers.run_files import RunFiles
from infinity.zero.build import Runtime
from infinity.zero.step_counter import Counts

ClientState = Callable[[], Mapping[str, Any]]
_POLL_S = 0.002
_LEAVE_S = 10.0  # a drive that hangs must not keep the process from exiting
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    """A step that is over and whose epoch is still open.

    Attributes:
        state: counters of the engine and of the updates, and the time, as plain values.
        extra: the serialised `TrainingState`.
    """

    state: Mapping[str, Any]
    extra: bytes


@dataclass(frozen=True)
class _Closed:
    """A step whose epoch is closed: its writes and its record are still to be made durable."""

    generation: Generation
    writes: list[IoFuture]
    gate: Future[None]


class Commits:
    """Commits the steps of one engine; the compute thread drives it.

    Args:
        run: the files.

    Attributes:
        client_state: returns the values that the training loop stores with every step.
    """

    def __init__(self, training: TrainingState, runtime: Runtime, run: RunFiles) -> None:
        self.client_state: ClientState = dict
        self._training = training
        self._runtime = runtime
        self._step = training.step
        self._run = run
        self._code_sums = CodeSums(training.module)
        self._slots = runtime.swap.slots
        self._due: _Due | None = None
        self._collect_error: Exception | None = None
        self._is_finished = False
        self._commits = 0  # of this process
        self._last = run.found.generations[0] if run.found is not None else None
        self._sequence = 0 if self._last is None else self._last.sequence
        self._gate: Future[None] = Future()
        self._gate.set_result(None)
        self._queue: SimpleQueue[_Closed | None] = SimpleQueue()
        self._owner = os.getpid()
        self._thread = start_thread(self._work, "infinity-commit")
        atexit.register(self._stop, _LEAVE_S)

    # Called by a step, see `StepKeeper` #

    def before_updates(self) -> None:
        """See `StepKeeper`.

        Raises:
            CheckpointError: an earlier process left a step, which was neither resumed nor removed.
            StorageError: the last step cannot be committed.
            Exception: `client_state` raised it after the last step, which is therefore not committed.
        """
        self.check_resumed("training")
        self._raise_collect_error()
        if self._due is not None:
            self._runtime.executor.compute_all()
            self._close_epoch()
        if self._gate.done():
            self._gate.result()  # raises the error of the last commit
        self._runtime.executor.write_changed()

    def step_over(self) -> None:
        """See `StepKeeper`.

        The step has been applied, so it must not fail now: the training loop might run it again. An error of
        `client_state` is raised before the next step.
        """
        try:
            self._due = self._collect()
        except Exception as error:
            self._collect_error = error
        self.commit_if_computed()

    def _raise_collect_error(self) -> None:
        """Raise, once, the error of `_collect` at the end of the last step."""
        error, self._collect_error = self._collect_error, None
        if error is not None:
            raise error

    def commit_if_computed(self) -> None:
        """See `StepKeeper`."""
        if self._due is not None and self._runtime.executor.in_flight.all_computed:
            self._close_epoch()

    def _collect(self) -> _Due:
        step = self._step
        extra = self._training.collect(self.client_state())
        extra["code_sums"] = self._code_sums.now()
        state = {"counters": asdict(step.counter.counts), "steps": dict(step.updates.steps), "time_s": time.time()}
        return _Due(state, serialise(extra))

    def _close_epoch(self) -> None:
        due, self._due = self._due, None
        assert due is not None
        self._gate.result()  # one commit at a time
        gate: Future[None] = Future()
        with self._runtime.arena.critical:
            slots, writes = self._slots.close_epoch(gate)
            self._gate = gate
            self._sequence += 1
            self._queue.put(_Closed(Generation(self._sequence, due.state, slots, due.extra), writes, gate))

    # The commit thread #

    def _work(self) -> None:
        while (closed := self._queue.get()) is not None:
            try:
                self._commit(closed)
            except BaseException as error:  # raised by the next write or wait
                closed.gate.set_exception(error)
            else:
                closed.gate.set_result(None)

    def _commit(self, closed: _Closed) -> None:
        for write in closed.writes:
            write.result()
        before = () if self._last is None else (self._last,)
        self._runtime.swap.record((closed.generation, *before))
        self._last = closed.generation
        self._commits += 1
        self._meet_ranks()

    def _meet_ranks(self) -> None:
        """Announce that this rank's record is written, and block until all ranks have announced theirs."""
        ranks, what = self._runtime.ranks, f"committed/{self._run.nonce}"
        ranks.tell(what)
        deadline_s = time.monotonic() + ranks.patience_s
        while missing := self._missing(what):
            if time.monotonic() > deadline_s:
                raise RankError(
                    f"rank {ranks.rank} of {ranks.size}: rank {missing[0]} has not committed its step within "
                    f"{ranks.timeout_s:g} s (communication.timeout)"
                )
            time.sleep(_POLL_S)

    def _missing(self, what: str) -> list[int]:
        ranks = self._runtime.ranks
        try:
            return ranks.untold(what, self._commits)
        except RuntimeError as error:  # the store is gone, perhaps because its rank has closed its engine
            raise RankError(f"rank {ranks.rank} of {ranks.size}: other ranks' commits are unknown: {error}") from error

    # Called by the user #

    @property
    def resumable_step(self) -> int | None:
        """The last committed step of an earlier process, until it is resumed; None if there is none."""
        if self._run.found is None or not self._slots.has_found:
            return None
        return int(self._run.found.generations[0].state["counters"]["global_steps"])

    def check_resumed(self, what: str) -> None:
        """Raise CheckpointError if there is a step to resume from, which `what` would overwrite."""
        step = self.resumable_step
        if step is not None:
            raise CheckpointError(
                f"{what} would overwrite the states of an earlier process: run {self._run.id} at step {step} "
                f"({self._run.record_path}). Call engine.resume() first (infinity train --resume) to continue it, or "
                f"remove it: infinity states remove {self._run.record_path.parent}"
            )

    def wait(self) -> None:
        """Block until every step that is over is committed on all ranks. No update may be pending.

        Raises:
            StorageError: a step cannot be committed.
        """
        self._raise_collect_error()
        self.commit_if_computed()
        self._gate.result()

    def commit(self) -> None:
        """Commit the present state: parameters, optimizer states and the rest. All ranks call this together."""
        self.check_resumed("engine.commit()")
        self.wait()
        self._runtime.executor.write_changed()
        self._due = self._collect()
        self.wait()

    def resume(self) -> tuple[Path | None, dict[str, Any] | None]:
        """Restore the last committed step of an earlier process. All ranks call this together.

        Returns:
            (path of the record, the client's state), or (None, None) if there is no such step.

        Raises:
            CheckpointError: the step does not fit this run; nothing has changed.
            StorageError: the step cannot be read; the engine is poisoned.
        """
        if self.resumable_step is None:
            return None, None
        ranks, step, path = self._runtime.ranks, self._step, self._run.record_path
        assert self._last is not None
        generation = self._last
        extra: dict[str, Any] = {}

        def check() -> None:
            extra.update(unpacked(generation.extra, f"the schedule and counters of the step in {path}"))
            self._training.check(path, extra, Parts())
            self._check_codes(path, extra.get("code_sums", {}))

        ranks.each(check, "resuming: what came with the step")
        try:
            with self._runtime.counters.aside("resume"):
                ranks.each(self._runtime.executor.take_over, "resuming: the tensors")
            self._runtime.show_newest()
            step.updates.steps = dict(generation.state["steps"])
            step.counter.resume(Counts(**generation.state["counters"]))
            self._training.apply(path, 0, extra, Parts())
        except BaseException as error:
            step.fail(error)  # values of two runs may be mixed
            raise
        self._slots.has_found = False
        return path, extra["client_state"]

    def _check_codes(self, path: Path, saved: Any) -> None:
        """Check that the model has the codes of the committed step, which stores only their checksums."""
        here = self._code_sums.now()
        if saved == here:
            return
        if not isinstance(saved, dict):
            raise CheckpointError(f"{path} is damaged: its `code_sums` are a {type(saved).__name__}")
        name = min((name for name in here.keys() | saved.keys() if here.get(name) != saved.get(name)), key=str)
        raise CheckpointError(
            f"parameter `{name}` has other codes than the run of {path} had, and a committed step does not contain "
            "codes: build the model with the same ones"
        )

    def end(self) -> None:
        """End the run: its files are removed when the engine is closed, so that no process can resume it."""
        self.wait()
        self._runtime.swap.discard_files()

    def is_worker(self) -> bool:
        """Whether the calling thread is the commit thread."""
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        """Commit the last step of an engine that is about to be closed, unless the engine has failed.

        Raises:
            Exception: the step cannot be committed on this rank. A later process resumes from the step before.
        """
        if self.resumable_step is not None or not self._step.at_rest or self._is_finished:
            return
        self._is_finished = True  # a second call must not raise the error again
        try:
            self._step.drain()
            self._raise_collect_error()
            self._gate.result()
        except RankError as error:  # this rank's record is written, and `resume` takes a step that all ranks have
            _log.warning("the last step may not be committed on other ranks: %s", error)

    def close(self) -> None:
        """Commit the last step if possible, and end the commit thread."""
        try:
            self.finish()
        except Exception as error:  # only logged: the engine was dropped, or another error closes it
            _log.warning("the last step is not committed: %s", error)
        finally:
            self._stop()
            atexit.unregister(self._stop)

    def _stop(self, timeout_s: float | None = None) -> None:
        """End the commit thread, after the commit of a step whose epoch is closed."""
        if os.getpid() == self._owner:  # a forked child has no such thread
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._slots.give_up(InfinityError("the engine was closed before its last step was committed"))
