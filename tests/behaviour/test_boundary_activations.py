"""Layer-major micro-batches and the tier of activations: what is held at the boundaries of blocks, and what moves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.io import Priority
from infinity.tiers import ActivationFiles, SameMemory
from tests.behaviour.test_activations import ROWS, placed
from tests.behaviour.test_models import Block, Chain

BLOCKS = 8
MICRO_BATCHES = 4
BOUNDARY_BYTES = ROWS * 32 * 4  # what a micro-batch hands from one block to the next
CUT_BYTES = BLOCKS * MICRO_BATCHES * BOUNDARY_BYTES


class Watched(Chain):
    """Every block is checkpointed; knows how many bytes of what passed between blocks are in memory, at most."""

    def __init__(self) -> None:
        super().__init__(BLOCKS)
        self.peak_bytes = 0
        self._passed: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(x.requires_grad_(), 0.1)
        for block in self.blocks:
            self._note(x)
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def _note(self, x: torch.Tensor) -> None:
        self._passed = [passed for passed in self._passed if not passed.expired()]
        self._passed.append(StorageWeakRef(x.untyped_storage()))
        self.peak_bytes = max(self.peak_bytes, len(self._passed) * BOUNDARY_BYTES)


def square(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()


def train(model: Any, settings: dict[str, Any], **how: Any) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    settings["gradient_accumulation_steps"] = MICRO_BATCHES
    data = iter(torch.randn(3 * MICRO_BATCHES, ROWS, 32, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(5)
    with infinity.initialize(model=model, config=settings, **how)[0] as engine:
        losses = [engine.train_batch(data, square).item() for _ in range(3)]
        return losses, dict(engine.named_parameters()), engine.stats().tier_bytes


def watched() -> Watched:
    torch.manual_seed(0)
    return Watched()


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    return ours[0] == theirs[0] and all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


def test_what_passes_between_blocks_is_held_in_the_tier_alone(tmp_path: Path) -> None:
    """One a micro-batch is in memory, where it waits for the next block, and one more where it is computed."""
    kept, moved = watched(), watched()
    expected = train(kept, placed(tmp_path, "none", accumulation="layer"))
    found = train(moved, placed(tmp_path, "nvme", 4 * BOUNDARY_BYTES, accumulation="layer"))
    assert same(found, expected)
    assert kept.peak_bytes >= CUT_BYTES
    assert moved.peak_bytes <= (MICRO_BATCHES + 2) * BOUNDARY_BYTES


@pytest.mark.parametrize("memory", ["132KiB", "700KiB", "16MiB"])
def test_a_device_of_its_own_hands_them_to_the_host_and_the_drive(memory, tmp_path: Path) -> None:
    expected = train(watched(), placed(tmp_path, "none", accumulation="layer"), link=SameMemory())
    for tier in ("cpu", "nvme"):
        model = watched()
        settings = placed(tmp_path, tier, memory, accumulation="layer")
        assert same(train(model, settings, link=SameMemory()), expected)
        if tier == "nvme" or memory == "16MiB":
            assert model.peak_bytes <= (MICRO_BATCHES + 2) * BOUNDARY_BYTES


def test_each_is_read_once_and_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward needs them a round after the other, in each the first micro-batch first: what was saved last is last."""
    reads = []

    def read(self: ActivationFiles, place: Any, span: Any, priority: Priority) -> Any:
        reads.append(priority)
        return unchanged(self, place, span, priority)

    unchanged = ActivationFiles.read
    monkeypatch.setattr(ActivationFiles, "read", read)
    train(watched(), placed(tmp_path, "nvme", MICRO_BATCHES * BOUNDARY_BYTES, accumulation="layer"))
    assert 80 <= len(reads) <= 3 * (BLOCKS + 1) * MICRO_BATCHES  # of three steps; the first block's input has a mask
    assert reads.count(Priority.DEMAND) <= len(reads) // 8


class Conditioned(nn.Module):
    """Every block has what the stem says of the input beside what the block before it says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Mixes() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x, condition)
        return x.square().mean()


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return self.block(x) * condition


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_what_all_blocks_are_given_has_the_sum_of_their_gradients(tier, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Conditioned()
    data = torch.randn(MICRO_BATCHES, ROWS, 32)
    plain = copy.deepcopy(model)
    for x in data:
        (plain(x) / MICRO_BATCHES).backward()
    settings = placed(tmp_path, tier, accumulation="layer") | {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    settings["gradient_accumulation_steps"] = MICRO_BATCHES
    with infinity.initialize(model=model, config=settings)[0] as engine:
        engine.train_batch(data)
        for name, values in engine.named_parameters():
            before = plain.get_parameter(name)
            torch.testing.assert_close(values, before.detach() - before.grad)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(2))


def test_a_block_that_changes_its_input_in_place_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), ChangesItsInput(), ChangesItsInput())
    settings = placed(tmp_path, "none", accumulation="layer") | {"gradient_accumulation_steps": 2}
    with (
        infinity.initialize(model=model, config=settings)[0] as engine,
        pytest.raises(RuntimeError, match="modified inplace"),
    ):
        engine.train_batch(torch.randn(2, ROWS, 32), square)
