"""A rank that waits for long says who is missing; one that gets on with files is waited for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from infinity.errors import RankError
from infinity.zero import meeting
from infinity.zero.meeting import Meeting, this_process
from infinity.zero.ranks import Pending, Ranks
from infinity.zero.watch import Watch
from tests.behaviour.ranks import free_port
from tests.prepared import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infinity.zero.watch._PERIOD_S", 0.02)
    monkeypatch.setattr("infinity.zero.watch._SILENT", 50)  # one second: a busy machine holds threads up
    monkeypatch.setattr("infinity.zero.watch._WARN_S", 0.1)
    monkeypatch.setattr(meeting, "_PROGRESS_S", 0.02)


def until(found: object) -> None:
    deadline = time.monotonic() + 20
    while not found():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def test_a_long_wait_names_who_is_not_there_and_where_it_was(quick, caplog) -> None:
    store = dist.HashStore()
    first, second, third = (Watch(store, rank, 3) for rank in range(3))
    try:
        with second.waiting("the reduce-scatter of unit `a`"):
            pass
        with caplog.at_level(logging.WARNING), first.waiting("the all-gather of unit `b`"):
            with third.waiting("the all-gather of unit `b`"):
                until(lambda: "rank 1 has not come" in (said := first.missing() or "") and "rank 2" not in said)
                until(lambda: "it came back from the reduce-scatter of unit `a`" in (first.missing() or ""))
                until(lambda: caplog.records)
            second.close()
            until(lambda: "rank 1 has not been heard of for" in (first.missing() or ""))
        said = [record.getMessage() for record in caplog.records]
        assert len([text for text in said if text.startswith("rank 0 has waited")]) == 1, said
        assert "for the all-gather of unit `b`: rank 1 has not come" in said[0]
        until(lambda: first.missing() is None)
    finally:
        for watch in (first, second, third):
            watch.close()


def test_an_error_names_who_is_missing_however_long_the_cause_is_looked_for(quick) -> None:
    waiting = meeting_of_two(dist.HashStore(), 0)
    waiting.watch = watch = Watch(dist.HashStore(), 0, 2)
    waiting.lonely = lambda: time.sleep(0.2)  # ten looks of the watch

    def fail() -> None:
        with Ranks(size=2, meeting=waiting).talking("the all-gather of unit `a`"):
            until(watch.missing)
            raise RuntimeError("timed out")

    try:
        with pytest.raises(RankError, match="; rank 1 has waited for no other rank yet"):
            fail()
    finally:
        watch.close()


class _Silent:
    """A store that does not answer."""

    def __init__(self) -> None:
        self.is_asked, self.is_over = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        self.is_asked.set()
        self.is_over.wait(60)
        raise RuntimeError("gone")


def test_a_process_that_has_given_up_its_ranks_does_not_wait_for_the_watch(quick, monkeypatch) -> None:
    """It ends without its threads. The store may not answer this one before the process ends."""
    monkeypatch.setattr("infinity.zero.ending._abandoned", [os.getpid()])
    store = _Silent()
    watch = Watch(store, 0, 2)
    with watch.waiting("the all-gather of unit `a`"):
        assert store.is_asked.wait(20)
        monkeypatch.setattr("infinity.zero.watch._PERIOD_S", 5.0)
        start_s = time.monotonic()
        watch.close()
        assert time.monotonic() - start_s < 5
    store.is_over.set()


def meeting_of_two(store: dist.Store, rank: int) -> Meeting:
    one = Meeting.__new__(Meeting)
    one.__dict__.update(_store=store, _rank=rank, _size=2, _others=[1 - rank], _passed=0, _gave_up=False, _told_s=-1.0)
    one.__dict__.update(processes=[], watch=None, is_lost=False)
    return one


def test_a_rank_that_gets_on_is_waited_for_and_one_that_is_silent_is_not(quick) -> None:
    store = dist.HashStore()
    waiting, working = meeting_of_two(store, 0), meeting_of_two(store, 1)

    def work() -> None:
        for _ in range(60):
            working.progress()
            time.sleep(0.03)
        working.together("the end", 30)

    thread = threading.Thread(target=work)
    start_s = time.monotonic()
    thread.start()
    waiting.together("the end", 1.0)
    assert time.monotonic() - start_s > 1.5
    thread.join()
    with pytest.raises(RankError, match=r"rank\(s\) 1 did not within 0\.3 s"):
        waiting.together("another", 0.3)


def test_a_rank_that_gives_up_is_found_at_every_moment(quick) -> None:
    store = dist.HashStore()
    waiting, training = meeting_of_two(store, 0), meeting_of_two(store, 1)
    found: list[str | None] = []

    class Looked:
        """The store; before each change that rank 0 makes, rank 1 looks for it."""

        def __getattr__(self, name: str) -> Any:
            if waiting._is_at("0", 0) or found:
                found.append(training.lonely())
            return getattr(store, name)

    one, waiting = waiting, meeting_of_two(store, 0)
    one._store = Looked()
    with pytest.raises(RankError, match="did not within"):
        one.together("a save", 0.1)
    assert len(found) > 3
    assert set(found) == {"rank 0 called a save, which all ranks must call together"}


def test_a_rank_of_this_machine_that_has_ended_is_not_waited_for(quick) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    waiting = meeting_of_two(dist.HashStore(), 0)
    other = this_process()
    waiting.processes = [other, type(other)(other.machine, other.namespace, child.pid, started_of(child.pid))]
    assert not waiting.processes[1].has_ended
    child.kill()
    with pytest.raises(RankError, match=rf"rank 1 \(process {child.pid}\) has ended"):
        waiting.together("the end", 60)  # while it is still a zombie
    child.communicate()
    assert waiting.processes[1].has_ended


def test_without_proc_no_rank_is_taken_for_ended(monkeypatch) -> None:
    def absent(_: Path) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("infinity.zero.meeting.read_task", absent)
    assert not this_process().has_ended


def started_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
import infinity
import infinity.zero.watch as watch

rank, store, stopped = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
watch._PERIOD_S = 0.2
dist.init_process_group(
    "gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=30)
)
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 1, "communication": {"timeout": 4}}
config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3}}
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
engine = infinity.initialize(model=model, config=config)[0]
for step in range(2):
    if step and rank == stopped:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    engine.backward(engine(torch.randn(1, 64)).square().mean())
    engine.step()
"""


def start(ended: ExitStack, store: str, stopped: int) -> list[Child]:
    return [ended.enter_context(Child(["-c", SCRIPT, str(rank), store, str(stopped)])) for rank in range(2)]


def test_a_rank_that_hangs_is_named_within_the_timeout_whatever_the_groups_own_is(tmp_path) -> None:
    """The process group was made with torch's half hour."""
    with ExitStack() as ended:
        processes = start(ended, f"file://{tmp_path}/store", 1)
        _, told = processes[0].communicate(timeout=100)
        assert processes[0].returncode != 0
        last = told.strip().splitlines()[-1]
        assert "RankError: rank 0 of 2: the " in told, told
        assert "rank 1 has not been heard of for" in told, last


def test_after_a_rank_was_waited_for_in_vain_no_other_wait_takes_long(monkeypatch) -> None:
    """The abort of a pass waits for its early all-gathers, a commit for the other ranks: each would take a timeout."""
    monkeypatch.setattr("infinity.zero.ending._abandoned", [])
    meeting = meeting_of_two(dist.HashStore(), 0)
    meeting.watch = watch = Watch(dist.HashStore(), 0, 2)
    ranks = Ranks(size=2, timeout_s=2.0, meeting=meeting)
    try:
        for least_s, most_s in [(1.5, 60.0), (0.0, 1.5)]:
            start_s = time.monotonic()
            with pytest.raises(RankError, match="the all-gather of unit `a` failed"):
                Pending(ranks, "the all-gather of unit `a`", _Never()).wait()
            assert least_s <= time.monotonic() - start_s < most_s
    finally:
        watch.close()


class _EndsAfterLook:
    """A collective that ends when the first look at it has timed out."""

    def __init__(self) -> None:
        self._looks = 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._looks += 1
        if self._looks == 1:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_look_has_not_failed() -> None:
    Pending(Ranks(size=2), "an agreement", _EndsAfterLook()).wait()


class _Never:
    """A collective to which another rank does not come. Like torch's, it has no timeout below a millisecond."""

    def wait(self, timeout: timedelta) -> None:
        milliseconds = timeout // timedelta(milliseconds=1)
        assert milliseconds > 0, "this would wait without a limit"
        time.sleep(milliseconds / 1000)
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_a_stopped_rank_that_has_the_store_does_not_hang_the_others() -> None:
    """Its connections stay open, and torch's client of the store waits for answers without a limit."""
    with ExitStack() as ended:
        processes = start(ended, f"tcp://127.0.0.1:{free_port()}", 0)
        _, told = processes[1].communicate(timeout=60)
        assert processes[1].returncode != 0
        assert "RankError: rank 1 of 2: the " in told, told
