"""Backward enters a unit once for every call of its module, and leaves it before it enters the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.zero.hooks import Hooks
from infinity.zero.partition import Alignment, UnitLayout, make_partition
from infinity.zero.unit import Unit, UnitCalls, UnitTotal
from tests.behaviour.test_models import (
    ROWS,
    WIDTH,
    Block,
    Chain,
    Checkpointed,
    CheckpointedReentrant,
    HandedOn,
    InPlace,
    Repeated,
    SharedInput,
    ViewsInPlace,
)


class Row:
    """What the hooks read of a unit."""

    def __init__(self, layout: UnitLayout) -> None:
        self.index, self.layout = layout.index, layout
        self.total, self.calls = UnitTotal(layout.trained), UnitCalls()


class Recorder:
    """Notes the units that backward uses, in its order."""

    def __init__(self) -> None:
        self.uses: list[int] = []
        self.in_use: list[Unit] = []
        self.most_in_use = 0

    def enter(self, units: tuple[Unit, ...]) -> None:
        """Forward, or its recomputation."""

    def backward_enter(self, units: tuple[Unit, ...]) -> None:
        self.uses.extend(unit.index for unit in units)
        self.in_use.extend(units)
        self.most_in_use = max(self.most_in_use, len(self.in_use))

    def leave(self, units: tuple[Unit, ...], *, ends_forward: bool = False) -> None:
        """Forward's; that of backward is followed by `backward_left`."""

    def backward_left(self, units: tuple[Unit, ...]) -> None:
        for unit in units:
            self.in_use.remove(unit)

    def in_parts(self, unit: Unit, slot: int, *, again: bool) -> None:
        raise AssertionError("no pass runs within another one")

    def gradient_ready(self, unit: Unit, slot: int, param: nn.Parameter) -> None:
        param.grad = None


def uses_of(model: nn.Module, inputs: torch.Tensor, *, alone: bool) -> Recorder:
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    partition = make_partition(model, groups, align=Alignment(8), persistence_threshold=0, offloaded=True)
    recorder = Recorder()
    units: list[Any] = [Row(layout) for layout in partition.units]
    hooks = Hooks(model, partition, units, recorder, (), alone=alone)
    with hooks.forward(training=True):
        loss = model(inputs).square().mean()
    loss.backward()
    assert not recorder.in_use, "what autograd's pass began is over with it"
    hooks.remove()
    return recorder


class Detached(Chain):
    """Each block also has a part that no gradient leaves."""

    class Aside(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.down(self.up(x.detach()))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Aside() for _ in range(4))


class ChangedViews(Chain):
    """Blocks get views of tensors that were changed in place since, whose nodes autograd makes when it is asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            whole = x * 1.0
            view = whole[:]
            whole *= 0.5
            x = block(view)
        return x


class TwoTowers(nn.Module):
    """Neither has an input with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x.detach()) * self.blocks[1](x.detach())


ORDERS: dict[Callable[[], nn.Module], list[int]] = {
    Chain: [3, 2, 1, 0],
    Detached: [3, 2, 1, 0],
    InPlace: [3, 2, 1, 0],
    ViewsInPlace: [3, 2, 1, 0],
    ChangedViews: [3, 2, 1, 0],
    SharedInput: [4, 3, 2, 1, 0, 5],
    HandedOn: [4, 3, 2, 1, 0],
    TwoTowers: [1, 0],
    Repeated: [0, 0, 1, 3, 2, 1, 0],
    Checkpointed: [3, 2, 1, 0],
    CheckpointedReentrant: [3, 2, 1, 0],
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of nested reentrant checkpoints
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "ranks"])
@pytest.mark.parametrize("inputs", ["leaf", "recorded"])
@pytest.mark.parametrize("build", ORDERS)
def test_backward_has_one_unit_in_use_at_a_time(build, inputs, alone) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    recorder = uses_of(build(), x * 1.0 if inputs == "recorded" else x, alone=alone)
    assert recorder.uses == ORDERS[build]
    assert recorder.most_in_use == 1
