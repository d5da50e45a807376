"""A unit whose memory the system refuses, or an interrupt cuts short, keeps nothing of the budget."""

from __future__ import annotations

import pytest

import infinity
from infinity.memory.stable import StableBuffer
from infinity.tiers.copies import Memory, State
from infinity.tiers.unit_params import UnitParams
from tests.api.placements import engine_in
from tests.behaviour.reference import batches, loss_of

DATA = batches(4)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_memory_that_is_not_there_is_not_counted(tmp_path, monkeypatch, error) -> None:
    def fail(_: StableBuffer) -> None:
        raise error

    with engine_in("moves", tmp_path) as engine:
        params = engine._runtime.params
        engine.backward(loss_of(engine, DATA[0]))
        engine.step()
        engine.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(StableBuffer, "allocate", fail)
            for _ in range(3):
                with pytest.raises(error):
                    loss_of(engine, DATA[1])
        there = [each.spec for each in params.units if each.field.state(Memory.DEVICE) is not State.ABSENT]
        assert params.ledger.used_bytes == sum(spec.nbytes for spec in there if spec.offloaded)
        engine.backward(loss_of(engine, DATA[1]))
        engine.step()


@pytest.mark.parametrize(("owner", "name"), [(UnitParams, "read"), (StableBuffer, "free")])
def test_an_interrupt_between_a_budget_and_a_unit_stops_the_engine(tmp_path, monkeypatch, owner, name) -> None:
    """The budget would count the unit twice, after its next fetch."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with engine_in("moves", tmp_path) as engine:
        engine.backward(loss_of(engine, DATA[0]))
        engine.step()
        engine.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(KeyboardInterrupt):
                loss_of(engine, DATA[1])
        with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
            loss_of(engine, DATA[1])
