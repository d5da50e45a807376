"""Every finished step stays on the drives: committed behind the training's back, and gone on from after a crash.

[Note: commits]
A step is *over* when `step()` returns, though some of its updates may go on under the next forward pass. What belongs
to it beside tensors (counters, schedule, random states, the client's state) is noted then. When its last update is
computed its epoch is closed (see slots.py), and a thread of its own waits for the writes, flushes the drives, writes
the record, and tells the other ranks. Meanwhile the next step computes; its first write waits for all ranks' records.
So one rank is at most one commit ahead of another, and both of a rank's slots are of use.
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
_LEAVE_S = 10.0  # a drive that hangs must not keep the process from ending
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    """A step that is over.

    Attributes:
        state: its counters and the like, plain.
        extra: what else belongs to it.
    """

    state: Mapping[str, Any]
    extra: bytes


@dataclass(frozen=True)
class _Closed:
    """A step whose epoch is closed: what is left is to have it on the drives."""

    generation: Generation
    writes: list[IoFuture]
    gate: Future[None]


class Commits:
    """Commits the steps of one engine; the compute thread drives it.

    Args:
        run: the files.

    Attributes:
        client_state: gives what the training loop wants to have kept with every step.
        checkpoints_of: name under which the run saves checkpoints.
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
        self._not_noted: Exception | None = None
        self._is_finished = False
        self._told = 0  # commits of these processes
        self._last = run.found.generations[0] if run.found is not None else None
        self._sequence = 0 if self._last is None else self._last.sequence
        self._gate: Future[None] = Future()
        self._gate.set_result(None)
        self._queue: SimpleQueue[_Closed | None] = SimpleQueue()
        self._owner = os.getpid()
        self._thread = start_thread(self._work, "infinity-commit")
        atexit.register(self._stop, _LEAVE_S)

    # What a step tells, see `StepKeeper` #

    def before_updates(self) -> None:
        """See `StepKeeper`.

        Raises:
            CheckpointError: nobody has said what becomes of an earlier process's step.
            StorageError: the last step cannot be committed.
            Exception: whatever the client's state has raised after the last step, which is not kept.
        """
        self.check_resumed("training")
        self._raise_not_noted()
        if self._due is not None:
            self._runtime.executor.compute_all()
            self._close_epoch()
        if self._gate.done():
            self._gate.result()  # raises why it could not be committed
        self._runtime.executor.write_changed()

    def step_over(self) -> None:
        """See `StepKeeper`.

        The step is applied, so that a loop must not see it fail and run it again: what the client's state raises is
        raised before the next one.
        """
        try:
            self._due = self._note()
        except Exception as error:
            self._not_noted = error
        self.commit_if_computed()

    def _raise_not_noted(self) -> None:
        """Raise, once, what kept the last step from being noted."""
        error, self._not_noted = self._not_noted, None
        if error is not None:
            raise error

    def commit_if_computed(self) -> None:
        """See `StepKeeper`."""
        if self._due is not None and self._runtime.executor.in_flight.all_computed:
            self._close_epoch()

    def _note(self) -> _Due:
        step = self._step
        extra = self._training.collect(self.client_state())
        extra["code_sums"] = self._code_sums.now()
        state = {"counters": asdict(step.counter.counts), "steps": dict(step.updates.steps), "time_s": time.time()}
        return _Due(state, serialise(extra))

    def _close_epoch(self) -> None:
        due, self._due = self._due, None
        assert due is not None
        self._gate.result()  # one at a time
        gate: Future[None] = Future()
        with self._runtime.arena.critical:
            slots, writes = self._slots.close_epoch(gate)
            self._gate = gate
            self._sequence += 1
            self._queue.put(_Closed(Generation(self._sequence, due.state, slots, due.extra), writes, gate))

    # What its thread does #

    def _work(self) -> None:
        while (closed := self._queue.get()) is not None:
            try:
                self._commit(closed)
            except BaseException as error:  # whoever writes next, or waits, gets it
                closed.gate.set_exception(error)
            else:
                closed.gate.set_result(None)

    def _commit(self, closed: _Closed) -> None:
        for write in closed.writes:
            write.result()
        before = () if self._last is None else (self._last,)
        self._runtime.swap.record((closed.generation, *before))
        self._last = closed.generation
        self._told += 1
        self._tell_ranks()

    def _tell_ranks(self) -> None:
        """Say that this rank's record is there, and wait until all ranks' are."""
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
            return ranks.untold(what, self._told)
        except RuntimeError as error:  # the store has gone, perhaps with a rank that has closed its engine
            raise RankError(f"rank {ranks.rank} of {ranks.size}: other ranks' commits are unknown: {error}") from error

    # What users ask for #

    @property
    def resumable_step(self) -> int | None:
        """The step of an earlier process that nobody has gone on from yet."""
        if self._run.found is None or not self._slots.has_found:
            return None
        return int(self._run.found.generations[0].state["counters"]["global_steps"])

    def check_resumed(self, what: str) -> None:
        """Raises CheckpointError if there is a step to go on from, which `what` would end."""
        step = self.resumable_step
        if step is not None:
            raise CheckpointError(
                f"{what} would overwrite what an earlier process has left: run {self._run.id} at step {step} "
                f"({self._run.record_path}). Call engine.resume() first (infinity train --resume) to go on from it, or "
                f"remove it: infinity states remove {self._run.record_path.parent}"
            )

    def wait(self) -> None:
        """Wait until every step that is over is committed on all ranks; no update may be pending.

        Raises:
            StorageError: it cannot be.
        """
        self._raise_not_noted()
        self.commit_if_computed()
        self._gate.result()

    def commit(self) -> None:
        """Commit what is now: parameters, states and what else belongs to the last step. All ranks call this."""
        self.check_resumed("engine.commit()")
        self.wait()
        self._runtime.executor.write_changed()
        self._due = self._note()
        self.wait()

    def resume(self) -> tuple[Path | None, dict[str, Any] | None]:
        """Go on from the step that an earlier process has finished last. All ranks call this.

        Returns:
            (the record, the client's state), or (None, None) if there is none.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
            StorageError: it cannot be read; the engine trains no more then.
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
        """A step does not keep codes, which never change: the model must have been built with the same ones."""
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
        """The run is over: nobody is to go on from its last step, whose files go with the engine."""
        self.wait()
        self._runtime.swap.discard_files()

    def is_worker(self) -> bool:
        """This thread is the one that commits."""
        return threading.current_thread() is self._thread

    def finish(self) -> None:
        """Commit the last step of an engine that is about to be closed, unless the engine has failed.

        Raises:
            Exception: it cannot be committed on this rank, so that a later process resumes from the step before.
        """
        if self.resumable_step is not None or not self._step.at_rest or self._is_finished:
            return
        self._is_finished = True  # raised once
        try:
            self._step.drain()
            self._raise_not_noted()
            self._gate.result()
        except RankError as error:  # this rank's record is written, and `resume` takes a step that all ranks have
            _log.warning("the last step may not be committed on other ranks: %s", error)

    def close(self) -> None:
        """Commit the last step, if that can be had, and stop."""
        try:
            self.finish()
        except Exception as error:  # an engine that was dropped, or that another error ends
            _log.warning("the last step is not committed: %s", error)
        finally:
            self._stop()
            atexit.unregister(self._stop)

    def _stop(self, timeout_s: float | None = None) -> None:
        """End the thread; a step whose epoch is closed is committed before."""
        if os.getpid() == self._owner:  # a child has no such thread
            self._queue.put(None)
            self._thread.join(timeout_s)
            self._slots.give_up(InfinityError("the engine was closed before its last step was committed"))
