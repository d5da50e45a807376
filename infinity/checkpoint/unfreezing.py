"""States for parameters that were frozen at `initialize` and are to be trained from now on.

[Note: states that are laid out anew]
How many states a unit has decides where everything lies: tiles, files, budgets, even where units are cut. So nothing is
moved about. Between two steps the engine's state is saved as a checkpoint, its tiers are given up and built again as
`initialize` builds them, and the checkpoint is loaded. In that checkpoint the parameters are frozen, so they begin with
their values and fresh states. If memory is too small for the new tiers, the old ones are built, and the engine is as it
was.
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
_ANEW = "save a checkpoint, and load it into an engine that is made with the parameter unfrozen"


def check_possible(name: str, config: Config, ranks: Ranks) -> None:
    """See that an engine can make states for a parameter that was frozen.

    Raises:
        ConfigError: it cannot; the message says what to do.
    """
    reason = ""
    if config.tiering.crash_consistent:
        reason = "the states on the drives (tiering.crash_consistent) are those of the parameters that were trained"
    elif not ranks.on_one_machine:
        reason = "the ranks are on several machines, which need not share a directory"
    if reason:
        raise ConfigError(
            f"parameter `{name}` was frozen at initialize and requires a gradient now, but {reason}: {_ANEW}"
        )


@contextmanager
def kept(session: Session, config: Config, ranks: Ranks) -> Iterator[Callable[[Session], None]]:
    """Save an engine's state for the time that the context lasts; all ranks call this between two steps.

    It is on the first of the drives, else where temporary files are, and stays there if the context fails.

    Yields:
        What loads it into the session of an engine with the same schedule, buffers and groups, which has other states.

    Raises:
        StorageError: it cannot be written; nothing has changed.
    """

    def make() -> str:
        drives = config.tiering.nvme
        if drives:  # its directory is still missing if nothing is kept on it
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
        _log.error("what was trained so far is in %s: engine.load_checkpoint takes it", directory)
        raise
    ranks.together("the end of unfreezing")
    if ranks.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
