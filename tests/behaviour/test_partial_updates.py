"""A unit of which an update touches a part: what it leaves alone reaches the drive too, and can be computed with."""

from __future__ import annotations

import copy

import torch
from torch import nn

import infinity
from infinity.schedule.actions import ParametersStale
from infinity.zero.updates import Updates
from tests.behaviour.reference import LR, Placement, Recipe, least_memory

WIDTH, BLOCKS = 100, 6
RECIPE = Recipe("fp32")


class Halves(nn.Module):
    """Two matrices, in tiles of their own, of which the second is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = self.first(x)
        return x + (y + self.second(x) if both else y)


class Chain(nn.Module):
    """Goes through as many of its blocks as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, count: int, both: bool) -> torch.Tensor:
        for block in self.blocks[:count]:
            x = block(x, both)
        return x.square().mean()


# A path through few blocks, whose plan has them stay in memory; then half of one of them, which may leave it now.
STEPS = [(2, True)] * 4 + [(2, False)]


def test_what_an_update_leaves_alone_is_no_older_on_the_drive(tmp_path) -> None:
    torch.manual_seed(0)
    model = Chain()
    reference = copy.deepcopy(model)
    inputs = [torch.randn(4, WIDTH) for _ in STEPS]
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    least = least_memory(copy.deepcopy(model), config)
    unit_bytes = 2 * WIDTH * (WIDTH + 1) * 4
    config["tiering"]["host_memory"] = least + unit_bytes  # of parameters, for three units
    optimizer = torch.optim.AdamW(reference.parameters(), **config["optimizer"]["params"])
    with infinity.initialize(model=model, config=config)[0] as engine:
        executor, params = engine._runtime.executor, engine._runtime.params
        for x, (count, both) in zip(inputs, STEPS, strict=True):
            reference(x, count, both).backward()
            optimizer.step()
            optimizer.zero_grad()
            if not both:
                engine.synchronize()
                assert params.units[0].is_dirty()  # else this shows nothing
                executor.cycle.plan = None  # the model took another path: whatever changes may leave memory
            engine.backward(engine(x, count, both))
            engine.step()
        engine.synchronize()
        for unit in range(BLOCKS):
            executor._report(ParametersStale(executor.units[unit]))
        values = dict(engine.named_parameters())
    for name, param in reference.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-5, atol=1e-6)


class Normed(nn.Module):
    """Blocks with a matrix that never has a gradient, so that the rest of theirs waits, and norms outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Halves() for _ in range(3))
        for index in range(3):
            self.add_module(f"norm{index}", nn.LayerNorm(WIDTH))
            self.add_module(f"small{index}", nn.Linear(WIDTH, WIDTH // 2))
            self.add_module(f"back{index}", nn.Linear(WIDTH // 2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            norm, small, back = (self.get_submodule(f"{name}{index}") for name in ("norm", "small", "back"))
            x = norm(back(small(block(x, False))))
        return x.square().mean() + x.mean()


def test_a_unit_that_is_updated_in_part_within_backward_is_computed_with_to_its_end(tmp_path, monkeypatch) -> None:
    """Memory is so short that norms whose gradients have come are updated while those of others are to come."""
    plain = Normed()
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path, 4096, schedule="backward"))
    config["tiering"]["host_memory"] = least_memory(copy.deepcopy(plain), config)
    optimizer = torch.optim.AdamW(plain.parameters(), **config["optimizer"]["params"])
    early = []
    monkeypatch.setattr(
        Updates, "_update_early", lambda self, of_torch=Updates._update_early: early.append(of_torch(self)) or early[-1]
    )
    with infinity.initialize(model=Normed(), config=config)[0] as engine:
        for x in torch.randn(3, 4, WIDTH):
            plain(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(x))
            engine.step()
        values = dict(engine.named_parameters())
    assert any(early)  # else this shows nothing
    for name, param in plain.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-2, atol=LR / 10)
