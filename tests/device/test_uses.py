"""On a device backward runs in a thread of its own, which counts autograd nodes by itself; uses are those elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.behaviour.test_models import ROWS, WIDTH, CheckpointedReentrant
from tests.behaviour.test_uses import ORDERS, uses_of


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of nested reentrant checkpoints
@pytest.mark.parametrize("build", ORDERS)
def test_backward_has_one_unit_in_use_at_a_time(build) -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH).to(device).requires_grad_()
    for _ in range(2):  # in the second, the numbers of the two threads overlap in another way
        recorder = uses_of(build().to(device), x * 1.0, alone=True)
        assert recorder.uses == ORDERS[build]
        assert recorder.most_in_use == 1


class Scaled(CheckpointedReentrant):
    """The root has a parameter of its own, which it reads before and after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale) * self.scale


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_call_goes_on_beyond_the_passes_that_checkpoints_run_within_it() -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    for _ in range(2):
        recorder = uses_of(Scaled().to(device), torch.randn(ROWS, WIDTH).to(device), alone=True)
        root, *blocks = recorder.uses
        assert (root, blocks, recorder.most_in_use) == (0, [4, 3, 2, 1], 2)
