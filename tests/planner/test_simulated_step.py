"""Steps of a few units, whose length can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from infinity.planner.simulated_step import SimulatedStep, simulate_step
from infinity.planner.step_work import StepWork, TileWork, UnitWork, UseWork
from infinity.schedule import make_plan

UNITS = 4


def even(busy: frozenset[str]) -> dict[str, float]:
    return dict.fromkeys(busy, 1.0)


def step(
    unit: UnitWork, *, room: int = UNITS, forward_s: float = 1.0, backward_s: float = 2.0, **more: object
) -> StepWork:
    """Units that are all alike, of which `room` fit."""
    moving = range(UNITS) if unit.nbytes else ()
    values: dict[str, object] = {
        "units": (unit,) * UNITS,
        "uses": tuple(UseWork(index, forward_s, backward_s) for index in range(UNITS)),
        "plan": make_plan([*moving, *reversed(moving)], [unit.nbytes] * UNITS, room * unit.nbytes),
        "params_bytes": room * unit.nbytes,
        "grads_bytes": UNITS * unit.grad_bytes,
        "slots": 4,
    }
    return StepWork(**values | more)  # type: ignore[arg-type]


def seconds(work: StepWork) -> float:
    return simulate_step(work, even).seconds


def stored(update_s: float, moved_s: float, tiles: int = 1) -> tuple[TileWork, ...]:
    return (TileWork(update_s, moved_s, moved_s),) * tiles


COMPUTING = UNITS * (1.0 + 2.0)


def test_computing_alone() -> None:
    done = simulate_step(step(UnitWork()), even)
    assert done == SimulatedStep(
        pytest.approx(COMPUTING),
        {"forward": pytest.approx(4.0), "backward": pytest.approx(8.0), "update": 0.0},
        {},
        {"compute": pytest.approx(COMPUTING), "optimizer": 0.0, "disk": 0.0, "link": 0.0, "collectives": 0.0},
        leased_bytes=0,
    )


def test_fetches_are_hidden_where_there_is_room_for_the_next_unit() -> None:
    unit = UnitWork(nbytes=1, read_s=0.5)
    assert seconds(step(unit, room=2)) == pytest.approx(COMPUTING)
    waiting = simulate_step(step(unit, room=1), even)
    assert waiting.seconds == pytest.approx(COMPUTING + 6 * 0.5), "all but the two turns, where a unit is used again"
    assert waiting.waits_s == {"disk": pytest.approx(6 * 0.5)}


def test_updates_run_under_backward_and_the_last_one_under_the_next_forward() -> None:
    unit = UnitWork(grad_bytes=1, tiles=(TileWork(1.5),))
    assert seconds(step(unit)) == pytest.approx(COMPUTING + 1.5), "the first unit is updated last and needed first"
    assert seconds(step(unit, runs_in_backward=False)) == pytest.approx(COMPUTING + 1.5 + 3 * 0.5)
    settled = simulate_step(step(unit, runs_in_backward=False, waits_for_updates=True), even)
    assert settled.seconds == pytest.approx(COMPUTING + 4 * 1.5)
    assert settled.phases_s["update"] == pytest.approx(4 * 1.5)


def test_a_slow_optimizer_is_waited_for() -> None:
    unit = UnitWork(grad_bytes=1, tiles=(TileWork(5.0),))
    done = simulate_step(step(unit), even)
    idle_s = 1.0 + 1.0 + 2.0  # the last unit that it has updated, and one after it, go forward, and that one backward
    assert done.seconds == pytest.approx(UNITS * 5.0 + idle_s)
    assert done.busy_s["optimizer"] == pytest.approx(UNITS * 5.0)


def test_gradients_without_room_hold_backward_up() -> None:
    unit = UnitWork(grad_bytes=1, tiles=(TileWork(3.0),))
    free, tight = seconds(step(unit)), seconds(step(unit, grads_bytes=1))
    assert tight > free + 1.0


def test_states_on_the_drive_pass_through_the_ring() -> None:
    """Ten tiles a unit, read and written at once: as long as the drive needs for either."""
    unit = UnitWork(grad_bytes=1, tiles=stored(0.01, 1.0, tiles=10))
    done = simulate_step(step(unit), even)
    assert done.busy_s["disk"] == pytest.approx(UNITS * 10.0, rel=0.15)
    assert done.seconds == pytest.approx(UNITS * 10.0, rel=0.15)


def test_a_ring_of_one_slot_reads_updates_and_writes_in_turn() -> None:
    unit = UnitWork(grad_bytes=1, tiles=stored(1.0, 1.0, tiles=10))
    one, four = (seconds(step(unit, slots=slots)) for slots in (1, 4))
    assert one == pytest.approx(UNITS * 10 * 3.0, rel=0.1)
    assert four == pytest.approx(UNITS * 10 * 1.0, rel=0.15)


def test_gradients_that_spill_are_written_and_read() -> None:
    kept = step(UnitWork(grad_bytes=1, tiles=(TileWork(0.1),)), runs_in_backward=False)
    spilling = replace(kept.units[0], grad_bytes=0, spill_s=0.5)
    work = replace(kept, units=(spilling,) * UNITS, spill_slots=2)
    left, found = 1, 2  # by backward in slots: not written, and not read again
    once = simulate_step(work, even)
    assert once.busy_s["disk"] == pytest.approx((2 * UNITS - left - found) * 0.5)
    twice = simulate_step(replace(work, passes=2), even)
    assert twice.seconds >= 2 * COMPUTING
    assert twice.busy_s["disk"] == pytest.approx((4 * UNITS - left - found) * 0.5)


def test_gradients_are_taken_over_by_the_compute_thread_once_a_pass() -> None:
    unit = UnitWork(grad_bytes=1, take_s=0.5, tiles=(TileWork(0.01),))
    for passes in (1, 2):
        done = simulate_step(step(unit, passes=passes), even)
        assert done.busy_s["compute"] == pytest.approx(passes * (COMPUTING + UNITS * 0.5))


def test_gradients_of_a_unit_that_is_used_twice_have_no_slot_in_between() -> None:
    spilling = UnitWork(spill_s=0.5, tiles=(TileWork(0.1),))
    work = replace(step(spilling, runs_in_backward=False), spill_slots=1)
    tied = replace(work, uses=(*work.uses, UseWork(0, 0.0, 0.0)))  # a head with the weights of the embedding
    once, twice = simulate_step(work, even), simulate_step(tied, even)
    assert twice.seconds == pytest.approx(once.seconds)
    assert once.waits_s["disk"] > (UNITS - 1) * 0.15, "each but the first waits for the slot of the one before"


def test_a_third_slot_hides_the_writes() -> None:
    spilling = UnitWork(spill_s=1.0, tiles=(TileWork(0.1),))
    two, three = (
        simulate_step(replace(step(spilling, runs_in_backward=False), spill_slots=slots), even) for slots in (2, 3)
    )
    assert two.waits_s["disk"] > 0.5
    assert three.waits_s.get("disk", 0.0) < 0.1


def test_a_device_uploads_and_downloads_beside_computing() -> None:
    unit = UnitWork(nbytes=1, up_s=0.9, down_s=1.9, grad_bytes=1, tiles=(TileWork(0.1),))
    done = simulate_step(step(unit, room=3), even)
    assert done.seconds < COMPUTING + 1.9 + 0.1 + 0.9 + 0.1
    assert done.busy_s["link"] > UNITS * 1.9
    stays = replace(unit, nbytes=0, up_s=0.0, publish_s=0.9)
    assert seconds(step(stays)) == pytest.approx(COMPUTING + 1.9 + 0.1 + 0.9), "the first unit's way there and back"


def test_the_next_unit_is_gathered_under_the_one_in_use() -> None:
    unit = UnitWork(nbytes=1, gather_s=0.5)
    assert seconds(step(unit)) == pytest.approx(COMPUTING, abs=2 * 0.5)


def test_speculative_updates_leave_less_work_after_the_norm() -> None:
    unit = UnitWork(grad_bytes=1, tiles=(TileWork(1.0),) * 2)
    deferred = step(unit, forward_s=0.1, runs_in_backward=False)
    ahead = replace(deferred, units=(replace(unit, undo_bytes=1),) * UNITS, undo_bytes=UNITS, speculates=True)
    half = replace(ahead, undo_bytes=UNITS // 2)
    assert seconds(ahead) < seconds(half) < seconds(replace(ahead, undo_bytes=0)) == seconds(deferred)
