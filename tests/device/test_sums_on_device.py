"""Gradients of several micro-batches are added up on the device, and leave it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.behaviour.reference import Placement, Recipe, assert_same_bits, batches
from tests.device import target
from tests.device.training import SPEEDS, STEPS, engine_on, on_cpu_like, tiny, train_here, train_over

MICRO_BATCHES = 3  # the first, the last, and one between them
RECIPE = Recipe("bf16", MICRO_BATCHES, 0.5, STEPS)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_as_many_bytes_as_of_one_micro_batch(tier, speed, tmp_path) -> None:
    with (
        target.configured(**SPEEDS[speed]),
        engine_on(target.DEVICE, tiny(), RECIPE, Placement(tier, tier, tmp_path, "64KiB")) as engine,
    ):
        ours = train_here(engine, RECIPE)
        moved = engine.stats().tier_bytes["device_to_host"]
        gradients = sum(unit.trainable_numel for unit in engine._runtime.partition.units) * torch.float32.itemsize
        parameters = sum(spec.nbytes for spec in engine._runtime.sizing.specs)
    assert_same_bits(ours, on_cpu_like(RECIPE))
    assert moved <= gradients + parameters  # which may be downloaded to be updated


@pytest.mark.parametrize("room", [0, 40_000, 200_000])
def test_gradients_without_room_on_the_device_are_summed_in_host_memory(room, tmp_path) -> None:
    placement = Placement("cpu", "cpu", tmp_path, "64KiB")
    with engine_on(target.DEVICE, tiny(), RECIPE, placement) as engine:
        ledger = engine._runtime.device
        others = sum(part.capacity_bytes for name, part in ledger.parts.items() if name != "sums of gradients")
    with (
        target.configured(launch_us=100),
        engine_on(target.DEVICE, tiny(), RECIPE, placement, device_memory=others + room) as engine,
    ):
        ours = train_here(engine, RECIPE)
        sums = engine._runtime.device.parts.get("sums of gradients")
        assert (0 if sums is None else sums.capacity_bytes) == room
        assert engine._runtime.device.peak_bytes <= others + room
    assert_same_bits(ours, on_cpu_like(RECIPE))


class Experts(nn.Module):
    """Which of the experts has a gradient depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for index in used:
            x = torch.tanh(self.experts[index](x))
        return self.head(x).float().square().mean()


def train_experts(device: str, schedule: str, do: Any = None) -> dict[str, torch.Tensor]:
    """Three micro-batches a step; the last of them does not use what the first has used."""
    config = Recipe("bf16", 3, 0.5).config(Placement("cpu", "cpu", schedule=schedule))
    config["train_micro_batch_size_per_gpu"] = 2
    config["tiering"]["fill_device"] = False
    with infinity.initialize(model=Experts(), config=config, device=device)[0] as engine:
        for step in range(STEPS):
            for micro_batch, used in enumerate(([0, 1], [1, 2], [2, 3])):
                x = torch.randn(2, 32, generator=torch.Generator().manual_seed(10 * step + micro_batch))
                engine.backward(engine(x.to(device, torch.bfloat16), used))
                if do is not None:
                    do(engine, step, micro_batch)
                engine.step()
        return {name: param.detach().cpu() for name, param in engine.named_parameters()}


def look(engine: infinity.Engine, step: int, micro_batch: int) -> None:
    if micro_batch == step % 3:
        assert infinity.utils.safe_get_full_grad(engine.module.experts[1].weight) is not None


def drop(engine: infinity.Engine, step: int, micro_batch: int) -> None:
    if (step, micro_batch) == (1, 1):
        engine.zero_grad()


def drop_one(engine: infinity.Engine, step: int, micro_batch: int) -> None:
    if (step, micro_batch) == (1, 1):
        engine.module.experts[1].weight.grad = None


@pytest.mark.parametrize("do", [None, look, drop, drop_one])
def test_parameters_without_a_gradient_in_the_last_micro_batch(do) -> None:
    with target.configured(launch_us=100):
        ours = train_experts(target.DEVICE, "auto", do)
    theirs = train_experts(target.REFERENCE, target.PLAIN.schedule, do)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


def test_a_look_that_has_no_room_loses_no_sum() -> None:
    def look_in_vain(engine: infinity.Engine, step: int, micro_batch: int) -> None:
        if (step, micro_batch) == (1, 0):
            gradients = engine._step.gradients
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gradients, "try_add", lambda addend: None)
                with pytest.raises(infinity.InfinityError, match="no memory to read gradients into"):
                    look(engine, 0, 0)

    ours = train_experts(target.DEVICE, "auto", look_in_vain)
    theirs = train_experts(target.REFERENCE, target.PLAIN.schedule)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


def test_the_last_micro_batch_may_be_declared_after_its_backward() -> None:
    def train(device: str, schedule: str) -> dict[str, torch.Tensor]:
        with engine_on(device, tiny(), RECIPE, Placement("cpu", "cpu", schedule=schedule)) as engine:
            for ids in batches(2 * STEPS):
                ids = ids.to(device)
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(ids, labels=ids).loss)
                engine.set_gradient_accumulation_boundary(True)
                engine.step()
            return {name: param.detach().cpu() for name, param in engine.named_parameters()}

    ours, theirs = train(target.DEVICE, "auto"), train(target.REFERENCE, target.PLAIN.schedule)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    class StopError(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise StopError

    with engine_on(target.DEVICE, tiny(), RECIPE, Placement("cpu", "cpu")) as engine:
        strange, broken, *data = batches(2 + STEPS * MICRO_BATCHES, seed=1)
        ids = strange.to(target.DEVICE)
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        handle = engine.module.transformer.h[0].mlp.c_fc.weight.register_hook(stop)
        ids = broken.to(target.DEVICE)
        with pytest.raises(StopError):
            engine.backward(engine(ids, labels=ids).loss)
        handle.remove()
        losses = train_over(engine, data)
    with engine_on(target.REFERENCE, tiny(), RECIPE, target.PLAIN) as engine:
        assert train_over(engine, data) == losses
