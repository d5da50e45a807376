"""Lanes whose times are known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from infinity.planner.lanes import Lanes


def even(busy: frozenset[str]) -> dict[str, float]:
    """Nobody knows of the others."""
    return dict.fromkeys(busy, 1.0)


def do(machine: Lanes, lane: str, seconds: Iterable[float]) -> None:
    for each in seconds:
        machine.wait(machine.put(lane, each))


def test_lanes_work_at_once_and_each_does_one_thing_after_the_other() -> None:
    machine = Lanes({"a": "one", "b": "two"}, even)
    tasks = [machine.put("b", 2.0), machine.put("b", 1.0)]
    do(machine, "a", [1.5, 2.5])
    assert machine.now_s == pytest.approx(4.0)
    assert machine.busy_s == {"one": pytest.approx(4.0), "two": pytest.approx(3.0)}
    assert machine.waited_s == {"a": pytest.approx(4.0)}
    assert all(task.done for task in tasks)


def test_lanes_that_slow_one_another_down_do_so_only_at_once() -> None:
    machine = Lanes({"a": "cores", "b": "cores"}, lambda busy: dict.fromkeys(busy, 1.0 / len(busy)))
    machine.put("b", 1.0)
    do(machine, "a", [3.0])
    assert machine.now_s == pytest.approx(4.0), "two seconds side by side for one of each, and two alone"
    assert machine.busy_s == {"cores": pytest.approx(4.0)}, "a part that two lanes are of is busy once at a time"


def test_what_is_urgent_goes_first_and_what_becomes_so_overtakes() -> None:
    machine, order = Lanes({"a": "one"}, even), list[str]()
    first = machine.put("a", 1.0, lambda _: order.append("first"))
    late = machine.put("a", 1.0, lambda _: order.append("late"))
    machine.put("a", 1.0, lambda _: order.append("urgent"), urgent=True)
    machine.hurry(late)
    machine.wait(first)
    assert order == ["urgent", "late", "first"]


def test_what_takes_no_time_is_done_at_once() -> None:
    machine = Lanes({"a": "one"}, even)
    assert machine.put("a", 0.0).done
    do(machine, "a", [0.0, 1e-30])
    assert machine.now_s == pytest.approx(0.0)


def test_a_wait_for_nothing_is_an_error() -> None:
    machine = Lanes({"a": "one"}, even)
    with pytest.raises(RuntimeError, match="deadlock"):
        machine.wait_until(lambda: False, "a")
