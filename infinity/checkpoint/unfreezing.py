"""Make optimizer states for parameters that were frozen at `initialize` and are trained from now on.

[Note: states that are laid out anew]
The layout of tiles, files, budgets and even units depends on the number of states. So nothing is moved in place.
Between two steps the engine's state is saved as a checkpoint, its tiers are freed and built again as by `initialize`,
and the checkpoint is loaded. In that checkpoint the parameters are frozen, so they keep their values and get fresh
states. If memory is too small for the new tiers, the old ones are built again, and the engine is unchanged.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.checkpoint.extra import Parts
from infinity.checkpoint.save import Options
from infinity.checkpoint.session import Session
from infinity.config import Config
from infinity.errors import ConfigError
from infinity.io.directory import open_directory
from infinity.zero.ranks import Ranks

_log = logging.getLogger(__name__)
_TAG = "before"
_REMEDY = "save a checkpoint, and load it into an engine that is made with the parameter unfrozen"


def check_possible(name: str, config: Config, ranks: Ranks) -> None:
    """Check that the engine can make states for parameter `name`, which was frozen.

    Raises:
        ConfigError: it cannot. The message says what to do.
    """
    reason = ""
    if config.tiering.crash_consistent:
        reason = "the states on the drives (tiering.crash_consistent) are those of the parameters that were trained"
    elif not ranks.on_one_machine:
        reason = "the ranks are on several machines, which need not share a directory"
    if reason:
        raise ConfigError(
            f"parameter `{name}` was frozen at initialize and requires a gradient now, but {reason}: {_REMEDY}"
        )


@contextmanager
def kept(session: Session, config: Config, ranks: Ranks) -> Iterator[Callable[[Session], None]]:
    """Keep a checkpoint of the engine's state during this context. All ranks call this between two steps.

    The checkpoint is on the first NVMe drive, or among temporary files if there is none. It is removed at the end,
    unless the context fails.

    Yields:
        A function that loads the checkpoint into a session, whose engine may have other optimizer states but must have
        the same schedule, buffers and groups.

    Raises:
        StorageError: the checkpoint cannot be written. Nothing has changed.
    """

    def make() -> str:
        drives = config.tiering.nvme
        if drives:  # the drive's directory does not exist if no state is placed on it
            os.close(open_directory(drives[0].path, make=True))
        return tempfile.mkdtemp(prefix="infinity-unfreezing-", dir=drives[0].path if drives else None)

    def restore(into: Session) -> None:
        parts = Parts(optimizer=True, lr_scheduler=False, progress=True)
        into.load(directory, _TAG, parts, strict_model=True)

    directory = Path(ranks.on_rank_0(make))
    try:
        session.save(directory, _TAG, {}, options=Options(), blocking=True)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    try:
        yield restore
    except BaseException:
        _log.error("the state before unfreezing is saved in %s: load it with engine.load_checkpoint", directory)
        raise
    ranks.together("the end of unfreezing")
    if ranks.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
