"""A unit of which an update touches a part: what it leaves alone reaches the drive too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import CapacityError
from tests.behaviour.reference import Placement, Recipe

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
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path, "64KiB", host_memory=1))
    with pytest.raises(CapacityError) as refused:
        infinity.initialize(model=copy.deepcopy(model), config=config)
    least = int(str(refused.value).split("Raise tiering.host_memory to ")[1].split()[0])
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
                executor._cycle.plan = None  # the model took another path: whatever changes may leave memory
            engine.backward(engine(x, count, both))
            engine.step()
        engine.synchronize()
        for unit in range(BLOCKS):
            executor._try_evict(unit)
        values = dict(engine.named_parameters())
    for name, param in reference.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), rtol=1e-5, atol=1e-6)
