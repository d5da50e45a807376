"""Lanes and processes whose times are known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from infinity.planner.lanes import Lanes, Process, Until


def even(busy: frozenset[str]) -> dict[str, float]:
    """Nobody knows of the others."""
    return dict.fromkeys(busy, 1.0)


def doing(machine: Lanes, lane: str, seconds: Iterable[float]) -> Process:
    for each in seconds:
        task = machine.put(lane, each)
        yield Until(lambda: task.done, lane)  # noqa: B023  (the wait is over before the next one)


def test_lanes_work_at_once_and_each_does_one_thing_after_the_other() -> None:
    machine = Lanes({"a": "one", "b": "two"}, even)
    tasks = [machine.put("b", 2.0), machine.put("b", 1.0)]
    machine.run(doing(machine, "a", [1.5, 2.5]))
    assert machine.now_s == pytest.approx(4.0)
    assert machine.busy_s == {"one": pytest.approx(4.0), "two": pytest.approx(3.0)}
    assert machine.waited_s == {"a": pytest.approx(4.0)}
    assert all(task.done for task in tasks)


def test_lanes_that_slow_one_another_down_do_so_only_at_once() -> None:
    machine = Lanes({"a": "cores", "b": "cores"}, lambda busy: dict.fromkeys(busy, 1.0 / len(busy)))
    machine.put("b", 1.0)
    machine.run(doing(machine, "a", [3.0]))
    assert machine.now_s == pytest.approx(4.0), "two seconds side by side for one of each, and two alone"
    assert machine.busy_s == {"cores": pytest.approx(4.0)}, "a part that two lanes are of is busy once at a time"


def test_what_is_urgent_goes_first_and_what_becomes_so_overtakes() -> None:
    machine, order = Lanes({"a": "one"}, even), list[str]()
    first = machine.put("a", 1.0, lambda: order.append("first"))
    late = machine.put("a", 1.0, lambda: order.append("late"))
    machine.put("a", 1.0, lambda: order.append("urgent"), urgent=True)
    machine.hurry("a", late)
    machine.run(doing_nothing_until(machine, first))
    assert order == ["urgent", "late", "first"]


def doing_nothing_until(machine: Lanes, task: object) -> Process:
    yield Until(lambda: task.done, "a")  # type: ignore[attr-defined]


def test_what_takes_no_time_is_done_at_once() -> None:
    machine = Lanes({"a": "one"}, even)
    assert machine.put("a", 0.0).done
    machine.run(doing(machine, "a", [0.0, 1e-30]))
    assert machine.now_s == pytest.approx(0.0)


def test_a_wait_for_nothing_is_an_error() -> None:
    machine = Lanes({"a": "one"}, even)

    def forever() -> Process:
        yield Until(lambda: False, "a")

    with pytest.raises(RuntimeError, match="everybody waits"):
        machine.run(forever())
