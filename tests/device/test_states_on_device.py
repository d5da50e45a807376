"""Optimizer states that lie on the device: nothing crosses the link, and the bits are those of the CPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import infinity
from infinity import CapacityError
from infinity.config.sizes import parse_size
from infinity.tiers import Memory
from tests.behaviour.reference import Placement, Recipe, assert_same_bits, batches
from tests.device import target
from tests.device.training import STEPS, engine_on, on_cpu_like, tiny, train_here, train_on_device, train_over

IN_BACKWARD = [Recipe("bf16", 1, 0.0, STEPS), Recipe("fp32", 2, 0.0, STEPS)]
AFTER_IT = [Recipe("bf16", 3, 0.5, STEPS), Recipe("fp16", 1, 0.5, STEPS)]
ON_DEVICE = Placement("none", "none")


@pytest.fixture(autouse=True)
def _slow_kernels():
    with target.configured(launch_us=100):
        yield


@pytest.mark.parametrize(
    ("recipe", "schedule"),
    [
        *product(IN_BACKWARD, ["auto", "deferred", "barrier"]),
        *product(AFTER_IT, ["auto", "barrier"]),  # where auto is deferred
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.precision}-{value.accumulation}-{value.clipping:g}",
)
def test_same_bits_and_nothing_on_the_link(recipe, schedule) -> None:
    placement = Placement("none", "none", schedule=schedule)
    with engine_on(target.DEVICE, tiny("llama"), recipe, placement) as engine:
        assert engine._runtime.sizing.rules.states.home is Memory.DEVICE
        ours = train_here(engine, recipe)
        moved = engine.stats().tier_bytes
    assert_same_bits(ours, on_cpu_like(recipe, "llama"))
    assert not moved


def test_layer_major_micro_batches() -> None:
    def train(device: str, placement: Placement) -> tuple[list[float], dict[str, torch.Tensor]]:
        recipe = Recipe("bf16", 3, 0.5, STEPS)
        with engine_on(device, tiny(), recipe, placement, accumulation="layer") as engine:
            data = [{"input_ids": ids.to(device), "labels": ids.to(device)} for ids in batches(STEPS * 3)]
            losses = [engine.train_batch(iter(data[3 * step : 3 * step + 3])).item() for step in range(STEPS)]
            return losses, {name: param.detach().cpu() for name, param in engine.named_parameters()}

    ours, theirs = train(target.DEVICE, ON_DEVICE), train(target.REFERENCE, target.PLAIN)
    assert ours[0] == theirs[0]
    assert all(torch.equal(values, theirs[1][name]) for name, values in ours[1].items())


def test_no_more_gradients_than_have_room() -> None:
    """The host runs ahead of the device, and waits for the oldest unit's update where the budget says so."""
    recipe = Recipe("bf16", 1, 0.0, STEPS)
    with pytest.raises(
        CapacityError, match=r"states .* and gradients .* there: set zero_optimization\.offload_optim"
    ) as e:
        train_on_device(recipe, ON_DEVICE, device_memory="64KiB")
    least = parse_size(str(e.value).split("device_memory to ")[1].split()[0])
    with engine_on(target.DEVICE, tiny(), recipe, ON_DEVICE, device_memory=least) as engine:
        ours = train_here(engine, recipe)
        assert engine._runtime.device.peak_bytes <= least
    assert_same_bits(ours, on_cpu_like(recipe))


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [(target.DEVICE, target.REFERENCE), (target.REFERENCE, target.DEVICE), (target.DEVICE, target.DEVICE)],
)
def test_a_checkpoint_goes_on_anywhere(saved_on, loaded_on, tmp_path) -> None:
    recipe = Recipe("bf16", 1, 0.5, STEPS)
    data = batches(STEPS)
    with engine_on(saved_on, tiny(), recipe, ON_DEVICE) as engine:
        losses = train_over(engine, data[:1])
        engine.save_checkpoint(tmp_path, blocking=False)
        losses += train_over(engine, data[1:])  # a look at the states leaves them as they are
    with engine_on(loaded_on, tiny(seed=5), recipe, ON_DEVICE) as engine:
        engine.load_checkpoint(tmp_path)
        assert train_over(engine, data[1:]) == losses[1:]
    assert losses == on_cpu_like(recipe).losses


def test_dropped_gradients_are_not_trained_on() -> None:
    recipe = Recipe("bf16", 1, 0.5, STEPS)
    strange, *data = batches(STEPS + 1)
    with engine_on(target.DEVICE, tiny(), recipe, ON_DEVICE) as engine:
        ids = strange.to(target.DEVICE)
        engine.backward(engine(ids, labels=ids).loss)
        engine.zero_grad()
        losses = train_over(engine, data)
    with engine_on(target.REFERENCE, tiny(), recipe, target.PLAIN) as engine:
        assert train_over(engine, data) == losses


def test_training_uses_values_written_to_parameters_and_through_the_api() -> None:
    def train(device: str, schedule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        placement = Placement("none", "none", schedule=schedule)
        model, config = tiny(), Recipe("bf16", 1, 0.5, STEPS).config(placement)
        config["zero_optimization"] = {"stage": 2}
        with infinity.initialize(model=model, config=config, device=device)[0] as engine:
            losses = []
            for ids in batches(STEPS):
                losses += train_over(engine, [ids])
                with torch.no_grad():
                    model.transformer.h[0].ln_1.weight.mul_(0.5)
                with infinity.zero.GatheredParameters([model.transformer.wte.weight], modifier_rank=0):
                    model.transformer.wte.weight.data.mul_(0.75)
            return losses, {name: param.detach().cpu() for name, param in engine.named_parameters()}

    ours, theirs = train(target.DEVICE, "auto"), train(target.REFERENCE, target.PLAIN.schedule)
    assert ours[0] == theirs[0]
    assert all(torch.equal(values, theirs[1][name]) for name, values in ours[1].items())


def test_a_gradient_that_is_not_finite_is_refused_or_skipped() -> None:
    for schedule, refused in (("backward", True), ("deferred", False)):
        model = tiny()
        with engine_on(target.DEVICE, model, Recipe("bf16"), Placement("none", "none", schedule=schedule)) as engine:
            before = {name: param.detach().cpu() for name, param in engine.named_parameters()}
            model.transformer.h[0].mlp.c_fc.weight.register_hook(lambda grad: grad * float("inf"))
            if refused:
                with pytest.raises(infinity.NonFiniteError, match="is not finite"):
                    train_over(engine, batches(1))
                continue
            train_over(engine, batches(1))
            assert engine.stats().skipped
            assert all(torch.equal(before[name], param.detach().cpu()) for name, param in engine.named_parameters())


def test_formats_that_round_stay_with_the_native_kernels() -> None:
    with engine_on(target.DEVICE, tiny(), Recipe("bf16"), ON_DEVICE, state_format="int8") as engine:
        assert engine._runtime.sizing.rules.states.home is Memory.HOST
