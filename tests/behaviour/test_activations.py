"""Saved activations in a lower tier: the same numbers, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.tiers import SameMemory
from tests.behaviour.test_models import Block, Chain, Checkpointed, CheckpointedReentrant, Experts, config

ROWS = 1024  # a checkpoint of these models has 128 KiB
STEPS = 3


class Many(Chain):
    """Every block is checkpointed."""

    def __init__(self) -> None:
        super().__init__(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Strided(Chain):
    """Saves transposed, expanded and overlapping tensors, and one twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        windows = x.unfold(0, 8, 4).transpose(1, 2)
        x = (x.t() * x.t()).t() + windows.square().mean() + x.t().contiguous().t().exp()
        return x * x.mean(1, keepdim=True).expand_as(x).sin()


class Mixture(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))


MODELS = [Chain, Many, Checkpointed, CheckpointedReentrant, Strided, Mixture]


def placed(path: Path, tier: str, memory: int | str = "1MiB", **tiering: Any) -> dict[str, Any]:
    settings = config(path)
    settings["tiering"] |= {"activations": tier, "activation_memory": memory} | tiering
    return settings


def train(build: Any, settings: dict[str, Any], **how: Any) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=build(), config=settings, **how)
    data = torch.randn(STEPS, ROWS, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    with engine:
        for x in data:
            loss = engine(x.requires_grad_()).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, dict(engine.named_parameters()), engine.stats().tier_bytes


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("memory", ["132KiB", "400KiB", "64MiB"])
def test_training_with_activations_on_nvme_gives_the_same_bits(build, memory, tmp_path: Path) -> None:
    losses, weights, _ = train(build, placed(tmp_path, "none"))
    ours, ours_weights, moved = train(build, placed(tmp_path, "nvme", memory))
    assert ours == losses
    for name, weight in weights.items():
        assert torch.equal(weight, ours_weights[name]), name
    assert moved["device_to_host"] >= 128 << 10
    assert not list(tmp_path.iterdir()), "a swap file is left behind"


def test_only_what_the_arena_cannot_hold_is_read_back(tmp_path: Path) -> None:
    read = {
        memory: train(Many, placed(tmp_path, "nvme", memory))[2].get("nvme_read", 0) for memory in ("256KiB", "16MiB")
    }
    assert read["256KiB"] - read["16MiB"] >= 5 * (128 << 10)


def test_host_memory_holds_what_fits_and_the_rest_stays(tmp_path: Path) -> None:
    losses, weights, _ = train(Many, placed(tmp_path, "none"), link=SameMemory())
    for memory in ("300KiB", "16MiB"):
        settings = placed(tmp_path, "auto", memory) | {"activation_checkpointing": {"cpu_checkpointing": "true"}}
        ours, ours_weights, _ = train(Many, settings, link=SameMemory())
        assert ours == losses
        assert all(torch.equal(weight, ours_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("backend", ["threads", "auto"])
def test_checksums_and_backends(backend, tmp_path: Path) -> None:
    losses, _, _ = train(Many, placed(tmp_path, "none"))
    settings = placed(tmp_path, "nvme", "256KiB", checksum=True, io_backend=backend)
    assert train(Many, settings)[0] == losses


def test_layer_major_micro_batches_keep_their_activations_on_nvme(tmp_path: Path) -> None:
    data = torch.randn(4, ROWS, 32, generator=torch.Generator().manual_seed(1))
    losses = []
    for tier in ("none", "nvme"):
        torch.manual_seed(0)
        settings = placed(tmp_path, tier, "512KiB", accumulation="layer") | {"gradient_accumulation_steps": 2}
        engine, *_ = infinity.initialize(model=Many(), config=settings)
        with engine:
            batches = iter(data)
            pairs = [engine.train_batch(batches, lambda out, _: out.square().mean()).item() for _ in range(2)]
            losses.append(pairs)
    assert losses[0] == losses[1]


class FailsHalfway(Many):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.fails:
            raise RuntimeError("on purpose")
        return x


def test_after_an_exception_nothing_of_the_step_is_held(tmp_path: Path) -> None:
    model = FailsHalfway()
    engine, *_ = infinity.initialize(model=model, config=placed(tmp_path, "nvme", "512KiB"))
    with engine:
        x = torch.randn(ROWS, 32)
        for fails in (True, False, True, False):
            model.fails = fails
            if fails:
                with pytest.raises(RuntimeError, match="on purpose"):
                    engine(x)
            else:
                engine.backward(engine(x).square().mean())
                engine.step()
        store = engine._step.activations
        assert store is not None
        assert store.count == 0
        assert store.arena.peak_bytes <= 512 << 10


def test_a_write_that_fails_is_an_error_and_no_wrong_number(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=Many(), config=placed(tmp_path, "nvme", "256KiB"))
    with engine:
        files = engine._step.activations._files
        for file in files._files:
            file.file.close()
            file.file = files._engine.open(file.owned.path, read_only=True)
        with pytest.raises(OSError, match="swap"):
            engine.backward(engine(torch.randn(ROWS, 32)).square().mean())


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    settings = {"train_batch_size": 1, "tiering": {"activations": "nvme"}}
    with pytest.raises(infinity.ConfigError, match=r"tiering.activations is nvme but no path"):
        infinity.initialize(model=Block(), config=settings)
