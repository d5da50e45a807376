"""`python -m tests.simulation.durable` runs the whole search; see docs/simulation.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from tests.simulation.durable import exports
from tests.simulation.durable.mutants import MUTANTS, find
from tests.simulation.durable.search import BASES, Counts, Search, sequences
from tests.simulation.durable.world import Layout

FIRST, COMMITTED = ("open", "step", "commit"), ("open", "step", "step", "commit")
SAVED = ("open", *BASES["trained"])
DAMAGED = (*SAVED, "step", "keep")


def plans(length: int) -> Iterator[tuple[str, Layout, int, str, Iterable[Sequence[str]]]]:
    """Name, layout, mutations of which all subsets are tried, method of `Search`, and what it is given."""
    one, two, apart = Layout(), Layout(ranks=2), Layout(ranks=2, apart=True)
    yield "1 rank", one, 6, "crashing", sequences(length)
    yield "1 rank", one, 6, "failing", sequences(min(length, 1))
    yield "1 rank", one, 6, "killed", sequences(min(length, 1))
    yield "1 rank", one, 6, "damaged", [DAMAGED]
    yield "1 rank, 2 drives", Layout(drives=2), 6, "crashing", sequences(min(length, 2))
    yield "1 rank, 2 drives", Layout(drives=2), 6, "killed", [FIRST, COMMITTED]
    yield "2 ranks", two, 4, "crashing", sequences(length)
    yield "2 ranks", two, 4, "failing", [COMMITTED, SAVED]
    yield "2 ranks", two, 4, "killed", [COMMITTED]
    yield "2 ranks", two, 4, "killed_publishing", [(*SAVED, "step", "save")]
    yield "2 ranks, 2 directories", apart, 4, "crashing", [*sequences(min(length, 1)), (*SAVED, "step", "save")]
    yield "2 ranks, 2 directories", apart, 4, "killed_publishing", [(*SAVED, "step", "save")]


def whole(length: int, only: str = "", tell: Callable[[str], None] = lambda what: None) -> dict[str, Counts]:
    """Everything whose name has `only`, with sequences of up to so many operations; raises `Violation`."""
    found = {}
    for layout_name, layout, most, method, given in plans(length):
        name = f"{method}, {layout_name}"
        if only in name:
            search = Search(layout, most)
            for sequence in given:
                getattr(search, method)(sequence)
            found[name] = search.counts
            tell(_row(name, search.counts))
    if only in "exports":
        found["exports"] = Counts()
        for kinds in exports.sequences(length):
            found["exports"].add(exports.search(kinds, 6))
        tell(_row("exports", found["exports"]))
    return found


def _row(name: str, counts: Counts) -> str:
    return f"{name:44} {counts}"


def main() -> int:
    """Returns 1 if a mutant is not found; a violation is raised."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.durable", description=__doc__)
    parser.add_argument("--length", type=int, default=3, help="most operations of a sequence")
    parser.add_argument("--only", default="", help="what names of rows have, such as `killed, 1 rank`")
    parser.add_argument("--mutants", action="store_true", help="look for each planted fault instead")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    if arguments.mutants:
        missed = [name for name in MUTANTS if find(name) is None]
        print(f"{len(MUTANTS)} planted faults, not found: {missed}")
        return int(bool(missed))
    begun_s = time.monotonic()
    found = whole(
        arguments.length, arguments.only, (lambda what: None) if arguments.json else partial(print, flush=True)
    )
    seconds = time.monotonic() - begun_s
    if arguments.json:
        print(json.dumps({name: vars(counts) for name, counts in found.items()} | {"seconds": round(seconds, 1)}))
    else:
        print(f"all holds, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
