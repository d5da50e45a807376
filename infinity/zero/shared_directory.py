"""Find out which ranks see the same directory. The path is no proof: each machine may have its own one of this name."""

from __future__ import annotations

import uuid
from pathlib import Path

from infinity.zero.ranks import Ranks

MARK = ".tmp-rank-"  # prefix of the file that a rank creates in a directory for the others to find


def directory_leaders(ranks: Ranks, directory: Path) -> list[int]:
    """Return, for every rank, the lowest rank whose `directory` is the same one.

    All ranks call this together. Each creates a file with a random name, and looks for the files of the others by name.
    No cache of a network filesystem contains a name that was never looked up.

    Raises:
        CheckpointError: another rank cannot write to its directory.
        OSError: this rank cannot write to its directory.
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
