"""Work on data that all ranks have, each item done by one of them for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from infinity.errors import ConfigError
from infinity.zero.ranks import Ranks

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turns(items: Iterable[Item], work: Callable[[Item], Result], ranks: Ranks, what: str) -> Iterator[Result]:
    """`work` of every item, in order, on every rank.

    Args:
        items: the same on all ranks.
        work: its results can be pickled.
        what: is done, for messages.

    Raises:
        ConfigError: it failed on a rank, or one rank has fewer items than another.
    """
    if ranks.size == 1:
        yield from map(work, items)
        return
    rest = iter(items)

    def turn() -> list[Result | None]:
        found = list(islice(rest, ranks.size))
        return [work(item) if rank == ranks.rank else None for rank, item in enumerate(found)]

    while True:
        turns = ranks.each(turn, what, ConfigError)
        counts = [len(each) for each in turns]
        if min(counts) < max(counts):
            fewer, more = counts.index(min(counts)), counts.index(max(counts))
            raise ConfigError(f"--data ends earlier on rank {fewer} than on rank {more}: give all ranks the same files")
        # Each result is of the rank whose turn it was, and no other's.
        yield from (turns[rank][rank] for rank in range(counts[0]))  # type: ignore[misc]
        if counts[0] < ranks.size:
            return
