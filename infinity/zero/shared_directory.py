"""Which ranks see the same directory. Paths prove nothing: every machine may have one of this name of its own."""

from __future__ import annotations

import uuid
from pathlib import Path

from infinity.zero.ranks import Ranks

MARK = ".tmp-rank-"  # what a rank leaves in a directory for the others to find


def directory_leaders(ranks: Ranks, directory: Path) -> list[int]:
    """For every rank, the lowest rank whose `directory` is the same one.

    All ranks call this together. Each leaves a file whose name nobody can know beforehand, and looks for the others'
    by name: a name that was never looked up is in no cache of a network filesystem.

    Raises:
        CheckpointError: a rank cannot write there.
        OSError: this one cannot.
    """
    if ranks.size == 1:
        return [0]
    nonce = ranks.on_rank_0(lambda: uuid.uuid4().hex)

    def mark(rank: int) -> Path:
        return directory / f"{MARK}{nonce}-{rank}"

    try:
        ranks.each(lambda: mark(ranks.rank).touch(exist_ok=False), "what each leaves in a directory")
        first = (rank for rank in range(ranks.size) if mark(rank).exists())
        return ranks.each(lambda: next(first, ranks.rank), "the look at what others left in a directory")
    finally:
        mark(ranks.rank).unlink(missing_ok=True)
