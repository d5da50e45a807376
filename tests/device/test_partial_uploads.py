"""A unit that the device waits for goes up piece by piece, as it is updated."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import infinity
from infinity.tiers import unit_params
from infinity.tiers.unit_params import UnitParams
from tests.behaviour.reference import Placement, Recipe, assert_same_bits, batches
from tests.device import target
from tests.device.training import SPEEDS, STEPS, engine_on, on_cpu_like, tiny, train_here, train_over

RECIPES = {"in_backward": Recipe("bf16", 1, 0.0, STEPS), "clipped": Recipe("fp32", 2, 0.5, STEPS)}


class Sent:
    """Parts that have gone up while others of their unit were being updated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.interrupts_at = 0
        upload = UnitParams.upload

        def counted(unit: UnitParams, stop: int) -> object:
            if stop == unit.spec.shard_numel:
                return upload(unit, stop)
            self.count += 1
            if self.count == self.interrupts_at:
                raise KeyboardInterrupt
            return upload(unit, stop)

        monkeypatch.setattr(UnitParams, "upload", counted)


@pytest.fixture
def sent(monkeypatch) -> Iterator[Sent]:
    monkeypatch.setattr(unit_params, "_PART_BYTES", 1)
    return Sent(monkeypatch)


def with_a_slow_optimizer(engine: infinity.Engine) -> infinity.Engine:
    engine._runtime.pipeline.before_update = lambda *_: time.sleep(0.001)
    return engine


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("where", "optimizer"), [("none", "cpu"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "cpu")])
def test_same_bits_and_as_many_bytes(where, optimizer, recipe, speed, sent, tmp_path) -> None:
    placement = Placement(where, optimizer, tmp_path, "16KiB")
    with target.configured(**SPEEDS[speed]), engine_on(target.DEVICE, tiny(), recipe, placement) as engine:
        ours = train_here(with_a_slow_optimizer(engine), recipe)
        moved = engine.stats().tier_bytes["host_to_device"]
        values = sum(spec.nbytes for spec in engine._runtime.sizing.specs)
    assert sent.count > STEPS or where == "nvme"  # what is not on the device yet comes up whole
    assert moved <= 2 * values + 4096  # a fetch may have been late for the update
    assert_same_bits(ours, on_cpu_like(recipe))


@pytest.mark.parametrize("at", [1, 2, 5])
def test_an_interrupt_between_two_parts_loses_none(at, sent, tmp_path) -> None:
    recipe = RECIPES["in_backward"]
    with engine_on(target.DEVICE, tiny(), recipe, Placement("cpu", "cpu", tmp_path, "16KiB")) as engine:
        first, *others = batches(STEPS)
        losses = train_over(with_a_slow_optimizer(engine), [first])
        sent.count, sent.interrupts_at = 0, at
        with pytest.raises(KeyboardInterrupt):
            engine(others[0].to(engine.device))
        losses += train_over(engine, others)
        weights = {name: param.detach().cpu() for name, param in engine.named_parameters()}
    there = on_cpu_like(recipe)
    assert losses == there.losses
    assert all((weights[name] == value).all() for name, value in there.weights.items())
