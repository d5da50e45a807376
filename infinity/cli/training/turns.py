"""Divides work on data that all ranks have: one rank processes an item, and all ranks get the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from infinity.errors import ConfigError
from infinity.zero.ranks import Ranks

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turns(items: Iterable[Item], work: Callable[[Item], Result], ranks: Ranks, what: str) -> Iterator[Result]:
    """Yield `work(item)` for every item, in order, on every rank.

    Args:
        items: the items, the same on all ranks.
        work: returns a result that can be pickled.
        what: name of the work, for messages.

    Raises:
        ConfigError: the work failed on a rank, or one rank has fewer items than another.
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
        # The result of an item comes from the rank that processed it.
        yield from (turns[rank][rank] for rank in range(counts[0]))  # type: ignore[misc]
        if counts[0] < ranks.size:
            return
