"""Save in the background: begun at one step, finished two steps later or by the next call of all ranks that needs it.

[Note: when it is finished]
All ranks finish a save together, so they must do it at the same point. Usually this is the end of the second step after
the save began: by then every update of the first step has run, and each tile was saved before its update. If a rank has
not written its frozen parameters by then, all ranks finish at the end of a later step. A call that needs the save
finishes it earlier: the next save, a load, a change of parameters, `wait_checkpoint`, `close`. A save is also finished
when the process exits, unless it exits by an error that other ranks may not have.
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

_STEPS = 2  # a save is finished this many steps after it began
_log = logging.getLogger(__name__)


class BackgroundSave:
    """One save that has begun and is not finished.

    Args:
        saving: the checkpoint; `begin` was called.
        frozen: save frozen parameters, too.
        over: called when the save is finished or cancelled, with the error that the next call for the save must raise,
            or None.
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
        step.at_end = self._finish_if_due
        atexit.register(self._at_exit)

    @property
    def path(self) -> Path:
        """The checkpoint's directory, which exists when the save is finished."""
        return self._saving.path

    def finish(self) -> None:
        """Write the rest of the checkpoint and publish it. All ranks call this together, between steps.

        Raises:
            StorageError: the checkpoint cannot be written. An older one of the same tag is unchanged.
            CheckpointError: another rank failed, or the cause is not the storage. Likewise.
        """
        try:
            if self._runtime.ranks.any(not self._snapshot.is_complete):
                self._step.drain()
            with self._runtime.counters.aside("save_checkpoint"):
                self._saving.finish(self._snapshot.finish)
        except InfinityError as error:
            what = f"the checkpoint of step {self._begun_at} ({self._saving.path}) is not saved"
            raise _with_context(error, what) from error
        finally:
            self._end()

    def end(self, why: str, *, failed: bool) -> None:
        """Finish the save if that is still possible, otherwise cancel it.

        Args:
            why: why no later step can finish it, for the message.
            failed: the reason is an error that other ranks may not have. Finishing would then wait for them in vain.

        Raises:
            StorageError, CheckpointError: as `finish`.
        """
        others_may_not_come = failed and self._runtime.ranks.meeting is not None
        if others_may_not_come or not self._step.at_rest:
            self.cancel(f"{why} before it was finished")
        else:
            self.finish()

    def cancel(self, why: str) -> None:
        """Remove the unfinished files of this rank. No other rank takes part."""
        if os.getpid() != self._owner:  # in a forked child: the parent continues the save
            return
        _log.error("the checkpoint of step %d (%s) is not saved: %s", self._begun_at, self._saving.path, why)
        self._end()

    def _finish_if_due(self) -> None:
        """Called at the end of each step: finish the save, see [Note: when it is finished]."""
        if self._step.counter.counts.global_steps < self._begun_at + _STEPS:
            return
        if self._with_frozen and self._runtime.ranks.any(self._snapshot.waits_for_frozen):
            return  # the end of the next step checks again
        try:
            self.finish()
        except InfinityError as error:
            if self._step.phase is Phase.FAILED:
                raise  # a tier has failed: the engine is poisoned
            _log.error("%s", error)
            # Its causes and frames refer to the engine, which stores this error: a reference cycle.
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


def _with_context(error: InfinityError, what: str) -> InfinityError:
    """Return the error with `what` before its message: the call that raises it may not be a save."""
    if isinstance(error, StorageError):
        return StorageError(error.errno or errno.EIO, f"{what}: {error.strerror}", str(error.filename), error.offset)
    return type(error)(f"{what}: {error}")
