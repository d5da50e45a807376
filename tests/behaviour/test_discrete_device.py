"""The path of a device with memory of its own, run on this machine through a link that copies within host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.tiers import SameMemory
from tests.behaviour.reference import ARCHITECTURES, Placement, Recipe, Result, batches, loss_of, tiny_gpt2, tiny_llama
from tests.behaviour.test_parity import assert_same_bits, in_memory


def train_discrete(model, recipe: Recipe, placement: Placement, **tiering: object) -> Result:
    config = recipe.config(placement)
    config["tiering"] |= tiering
    with infinity.initialize(model=model, config=config, link=SameMemory())[0] as engine:
        losses = []
        for ids in batches(recipe.steps * recipe.accumulation):
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return Result(losses, dict(engine.named_parameters()))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(
    ("precision", "accumulation", "clipping"), [("bf16", 1, 0.0), ("bf16", 1, 0.5), ("fp32", 4, 0.5)]
)
def test_a_discrete_device_gives_the_same_bits(
    architecture, device, precision, accumulation, clipping, tmp_path
) -> None:
    recipe = Recipe(precision, accumulation, clipping)
    placed = train_discrete(ARCHITECTURES[architecture](), recipe, Placement(device, device, tmp_path))
    assert_same_bits(placed, in_memory(architecture, precision, accumulation, clipping))


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("host_memory", ["2MiB", "1GiB"])
def test_tight_device_memory_gives_the_same_bits(clipping, host_memory, tmp_path) -> None:
    """Room for two blocks on the device, so that units come and go all the time."""
    recipe = Recipe("bf16", 1, clipping)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", host_memory)
    placed = train_discrete(tiny_llama(), recipe, placement, device_memory=least_device_memory(placement, recipe))
    assert_same_bits(placed, in_memory("llama", "bf16", 1, clipping))


def least_device_memory(placement: Placement, recipe: Recipe) -> int:
    config = recipe.config(placement)
    config["tiering"] |= {"device_memory": 1}
    with pytest.raises(infinity.CapacityError, match=r"tiering\.device_memory is 1 B") as refused:
        infinity.initialize(model=tiny_llama(), config=config, link=SameMemory())
    return int(str(refused.value).split("raise it to ")[1].split()[0])


def test_checkpoints_move_between_kinds_of_devices(tmp_path) -> None:
    recipe = Recipe("bf16", clipping=0.5)
    data = batches(8)
    swap = tmp_path / "swap"
    swap.mkdir()
    config = recipe.config(Placement("nvme", "nvme", swap, "64KiB"))

    def run(engine: infinity.Engine, part: list[torch.Tensor]) -> list[float]:
        losses = []
        for ids in part:
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    with infinity.initialize(model=tiny_gpt2(), config=config, link=SameMemory())[0] as engine:
        run(engine, data[:4])
        engine.save_checkpoint(tmp_path / "saved")
        uninterrupted = run(engine, data[4:])
    for link in (None, SameMemory()):
        with infinity.initialize(model=tiny_gpt2(5), config=config, link=link)[0] as engine:
            engine.load_checkpoint(tmp_path / "saved")
            assert run(engine, data[4:]) == uninterrupted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_cuda_placements_agree(architecture, device, clipping, tmp_path: Path) -> None:
    """On a GPU every placement computes the same kernels on the same values."""
    recipe = Recipe("bf16", 1, clipping)

    def train_on_gpu(placement: Placement) -> Result:
        config = recipe.config(placement)
        losses = []
        with infinity.initialize(model=ARCHITECTURES[architecture](), config=config, device="cuda")[0] as engine:
            for ids in batches(recipe.steps):
                loss = loss_of(engine, ids.to(engine.device))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            return Result(losses, dict(engine.named_parameters()))

    assert_same_bits(train_on_gpu(Placement(device, device, tmp_path)), train_on_gpu(Placement("none", "cpu")))
