"""A save that training does not wait for: begun at one step, finished two steps later or at the next call of all ranks.

[Note: when it is finished]
All ranks finish it together, so it must be at a moment that is the same for all of them: at the end of the second step
after it was begun, when every update of the first one has come past; of a later one if frozen parameters are not
written by then, which the ranks ask each other; or before, at whatever asks for it (the next save, a load, a change of
parameters, `wait_checkpoint`, the engine's end). At the process's end it is finished too, unless the process ends by an
error that other ranks may not have.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from infinity.checkpoint.save import Saving
from infinity.checkpoint.snapshot import Snapshot
from infinity.errors import InfinityError, StorageError
from infinity.zero.build import Runtime
from infinity.zero.phases import Phase
from infinity.zero.step import Step

_STEPS = 2
_log = logging.getLogger(__name__)


class BackgroundSave:
    """One save on its way.

    Args:
        saving: has begun.
        frozen: frozen parameters are saved, too.
        over: called when it is finished or given up; with the error that whoever asks for it next must get, if there is
            one.
    """

    def __init__(
        self,
        saving: Saving,
        runtime: Runtime,
        step: Step,
        *,
        frozen: bool,
        over: Callable[[InfinityError | None], None],
    ) -> None:
        self._saving = saving
        self._runtime = runtime
        self._step = step
        self._over = over
        self._begun_at = step.counter.counts.global_steps
        self._owner = os.getpid()
        self._with_frozen = frozen
        self._snapshot = Snapshot(saving.shards, runtime, frozen=frozen)
        step.at_end = self._look
        atexit.register(self._at_exit)

    @property
    def path(self) -> Path:
        """The checkpoint's directory, once it is there."""
        return self._saving.path

    def finish(self) -> None:
        """Have the checkpoint be there; all ranks call this together, between steps.

        Raises:
            StorageError: it cannot be written; there is none of this tag, or the one of before.
            CheckpointError: likewise, on another rank or for another reason.
        """
        try:
            if self._runtime.ranks.any(not self._snapshot.is_complete):
                self._step.drain()
            with self._runtime.counters.aside("save_checkpoint"):
                self._saving.finish(self._snapshot.finish)
        except InfinityError as error:
            raise _told(error, f"the checkpoint of step {self._begun_at} ({self._saving.path}) is not saved") from error
        finally:
            self._end()

    def end(self, why: str, *, failed: bool) -> None:
        """Finish it, if that can be done still; else give it up.

        Args:
            why: there is no later.
            failed: an error is the reason, which other ranks may not have; they would be waited for.

        Raises:
            StorageError, CheckpointError: as `finish`.
        """
        lonely = failed and self._runtime.ranks.meeting is not None
        if lonely or not self._step.at_rest:
            self.give_up(f"{why} before it was finished")
        else:
            self.finish()

    def give_up(self, why: str) -> None:
        """Remove what there is of it; on this rank alone."""
        if os.getpid() != self._owner:  # a child, whose parent goes on with it
            return
        _log.error("the checkpoint of step %d (%s) is not saved: %s", self._begun_at, self._saving.path, why)
        self._end()

    def _look(self) -> None:
        """A step is over."""
        if self._step.counter.counts.global_steps < self._begun_at + _STEPS:
            return
        if self._with_frozen and self._runtime.ranks.any(self._snapshot.waits_for_frozen):
            return  # a later step looks again
        try:
            self.finish()
        except InfinityError as error:
            if self._step.phase is Phase.FAILED:
                raise  # a tier has failed, so that nothing can be run again
            _log.error("%s", error)
            # Without its causes and frames, which lead to the engine that keeps it.
            error.__cause__ = error.__context__ = None
            self._over(error.with_traceback(None))

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        self._step.at_end = None
        with ExitStack() as rest:
            rest.callback(self._over, None)
            rest.callback(self._saving.close)
            rest.callback(self._snapshot.close)

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return
        try:
            self.end("the process ended", failed=getattr(sys, "last_value", None) is not None)
        except InfinityError as error:
            _log.error("%s", error)


def _told(error: InfinityError, what: str) -> InfinityError:
    """The same error, which says of which save it is: it is raised where something else was asked for."""
    if isinstance(error, StorageError):
        return StorageError(error.errno or errno.EIO, f"{what}: {error.strerror}", str(error.filename), error.offset)
    return type(error)(f"{what}: {error}")
