"""No crash leaves anything but the last step and checkpoint that were told of; the search would notice if one did."""

from __future__ import annotations

import pytest

from tests.simulation.durable import exports
from tests.simulation.durable.__main__ import DAMAGED
from tests.simulation.durable.drive import BLOCK, ROOT, Cached, Disk, Flush, Names, Write, losses
from tests.simulation.durable.history import Violation
from tests.simulation.durable.mutants import MUTANTS, find, planted
from tests.simulation.durable.search import BASES, Search, sequences
from tests.simulation.durable.world import Layout


def test_a_small_search_of_one_rank() -> None:
    search = Search(Layout(), most=4)
    for sequence in sequences(1):
        search.crashing(sequence)
    for sequence in sequences(0):
        search.failing(sequence)
    search.damaged(DAMAGED)
    assert search.counts.adopted > 1000
    assert search.counts.loaded > 500


def test_a_small_search_of_two_ranks() -> None:
    search = Search(Layout(ranks=2), most=2)
    for more in (("commit",), ("begin", "part", "step"), ("restart",)):
        search.crashing(("open", *BASES["trained"], *more))
    assert not search.counts.refused


def test_a_checkpoint_that_is_replaced_on_two_machines() -> None:
    search = Search(Layout(ranks=2, apart=True), most=1)
    search.crashing(("open", *BASES["trained"], "step", "save"))
    assert not search.counts.refused


def test_a_save_after_one_that_died_on_two_machines() -> None:
    """Rank 0's new checkpoint has its name, and that is not on the drive, while the next save removes the old one."""
    search, sequence = Search(Layout(ranks=2, apart=True), most=1), ("open", *BASES["trained"], "step", "save")
    named = [isinstance(each, Names) and each.changes[-1][1] == "tag" for each in search.events_of(sequence)]
    search.run((*sequence, "restart", "save"), len(sequence) - 1, until=len(named) - named[::-1].index(True))
    assert not search.counts.refused


def test_a_save_after_one_that_died_between_its_renames() -> None:
    search = Search(Layout(), most=2)
    search.killed(("open", *BASES["trained"], "save"), first=26)
    assert not search.counts.refused


def test_a_step_that_a_dead_process_has_left_lasts_before_the_step_before_is_forgotten() -> None:
    search, sequence = Search(Layout(ranks=2), most=2), ("open", "step", "step", "commit")
    named = [isinstance(each, Names) and each.changes[-1][1].endswith(".record") for each in search.events_of(sequence)]
    search.run((*sequence, "restart"), len(sequence) - 1, until=len(named) - named[::-1].index(True))
    assert not search.counts.refused


def test_states_on_two_drives() -> None:
    search = Search(Layout(drives=2), most=4)
    for sequence in sequences(1):
        search.crashing(sequence)
    assert not search.counts.refused


@pytest.mark.parametrize("kinds", exports.sequences(2), ids=" then ".join)
def test_a_crash_leaves_an_export_that_is_whole_or_refused(kinds: tuple[str, ...]) -> None:
    assert exports.search(kinds, most=4).loaded


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str) -> None:
    assert find(name) is not None, MUTANTS[name].why


def test_a_planted_fault_is_gone_afterwards() -> None:
    with planted("slots_not_flushed"), pytest.raises(Violation, match="other values"):
        Search(Layout()).crashing(("open", "step", "commit"))
    Search(Layout()).crashing(("open", "step", "commit"))


def test_what_a_drive_keeps() -> None:
    one, two = bytes([1]) * BLOCK, bytes([2]) * BLOCK
    cached = Cached(Disk(directories={ROOT: {}}), [])
    for event in (Names(((ROOT, "new", 1),)), Write(1, 0, one), Flush(1), Write(1, 1, two)):
        cached.take(event)
    assert [type(change) for change, _ in cached.waiting] == [Names, Write]  # flushed, and without a name
    cached.take(Names(((ROOT, "new", None), (ROOT, "old", 1))))
    cached.take(Flush(1, failed=True))
    cached.take(Flush(1))  # says nothing of what the one before has dropped
    cached.take(Flush(ROOT))
    left = {cached.after(kept).content(1) for kept in losses(len(cached.waiting), 6)}
    assert left == {one, one + two}
    assert cached.lasting.directories == {ROOT: {"old": 1}}
