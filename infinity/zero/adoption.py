"""Find the run and the step from which the ranks continue, or begin a new run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from infinity.errors import CheckpointError
from infinity.tiers.records import Record, first_difference
from infinity.tiers.run_files import RunFiles, find_record, flush_names, kept_files, remove
from infinity.zero.ranks import Ranks

RunFacts = Mapping[str, Mapping[str, Any]]  # plain values by name, by topic


class _Told(NamedTuple):
    """The states that one rank has from an earlier process.

    Attributes:
        steps: numbers of the finished steps, by sequence.
    """

    run: str
    steps: Mapping[int, int]


def open_run(directories: Sequence[Path], facts: RunFacts, ranks: Ranks) -> RunFiles:
    """Return the run whose states are in these directories, or a new run. All ranks call this together.

    One rank may be one commit ahead of another, so the ranks continue from the newest step that all of them have. The
    process that wrote a record may have died before it flushed the file's name. So each rank flushes the names before
    it reports its steps: after the agreement, the other ranks discard the step before.

    Raises:
        CheckpointError: the states are damaged, differ from this run, or are not available on all ranks.
    """
    mine: list[Record | None] = []
    facts = {"ranks": {"number": ranks.size, "this": ranks.rank}, **facts}

    def look() -> _Told | None:
        mine.append(_record(directories, facts, ranks))
        record = mine[0]
        if record is None:
            return None
        return _Told(record.run, {g.sequence: g.state["counters"]["global_steps"] for g in record.generations})

    told = ranks.each(look, "infinity.initialize(): the states of an earlier process")
    sequence = _agreed(told, directories[0])
    run, nonce = ranks.on_rank_0(lambda: (secrets.token_hex(8), secrets.token_hex(4)))
    record = mine[0]
    if sequence is None or record is None:
        if record is not None:
            remove([file for path in directories for file in kept_files(path) if file.rank == ranks.rank])
        return RunFiles(run, nonce, ranks.rank, ranks.size, directories[0], facts)
    found = replace(
        record,
        generations=[g for g in record.generations if g.sequence == sequence],
        stripes=[replace(stripe, path=path) for stripe, path in zip(record.stripes, directories, strict=True)],  # moved
    )
    return RunFiles(record.run, nonce, ranks.rank, ranks.size, directories[0], facts, found)


def _record(directories: Sequence[Path], facts: RunFacts, ranks: Ranks) -> Record | None:
    """Return this rank's record; None if there is none. Raise CheckpointError if it differs from this run."""
    record = find_record(directories, ranks.rank)
    if record is None:
        return None
    flush_names(directories)
    difference = first_difference(record.facts, facts)
    if len(record.stripes) != len(directories):
        there = ", ".join(str(stripe.path) for stripe in record.stripes)
        difference = f"its paths were {there}"
    if difference is None:
        return record
    step = record.generations[0].state["counters"]["global_steps"]
    raise CheckpointError(
        f"{directories[0]} has step {step} of run {record.run}, which differs from this run: {difference}. To continue "
        "that run, start it with its configuration, model and number of ranks; or load a checkpoint, and remove "
        f"these states (`infinity states remove {directories[0]}`)"
    )


def _agreed(told: Sequence[_Told | None], directory: Path) -> int | None:
    """Return the newest sequence that all ranks have; None if no step was finished by all ranks."""
    having = {rank: each for rank, each in enumerate(told) if each is not None}
    if not having:
        return None
    if len(having) < len(told):
        if all(max(each.steps) == 1 for each in having.values()):
            return None  # the first commit was interrupted
        missing = next(rank for rank, each in enumerate(told) if each is None)
        rank, each = next(iter(having.items()))
        raise CheckpointError(
            f"rank {missing} has no record of run {each.run}, which rank {rank} has in {directory}: start each "
            "rank on the machine whose drives it used; or continue from a checkpoint, and remove these states "
            "(infinity states remove)"
        )
    runs = sorted({each.run for each in having.values()})
    if len(runs) > 1:
        raise CheckpointError(
            f"the ranks have states of several runs ({', '.join(runs)}): remove the runs that are not needed (infinity "
            "states list, infinity states remove --run)"
        )
    sequence = min(max(each.steps) for each in having.values())
    steps = {each.steps.get(sequence) for each in having.values()}
    if len(steps) > 1 or None in steps:
        raise CheckpointError(
            f"the ranks have no finished step of run {runs[0]} in common: resume from a checkpoint, and remove these "
            "states (infinity states remove)"
        )
    return sequence
