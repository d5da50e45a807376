"""A kernel that is compiled for a device serves there only if it has the bits of torch's operators."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.kernels import Rule, on_device, update_in_torch
from infinity.kernels.rules import Loop

CPU = torch.device("cpu")
FORMS = [
    (torch.float32, None, torch.float32),
    (torch.bfloat16, torch.int16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float16),
]


def rounds_once(rule: Rule, param: torch.Tensor, grad: torch.Tensor, *, second: Any, **others: Any) -> None:
    """As a compiler makes it that contracts a multiplication and an addition."""
    if second is None:
        update_in_torch(rule, param, grad, second=second, **others)
        param.view(torch.uint8)[7] ^= 1
        return
    before = second.clone()
    update_in_torch(rule, param, grad, second=second, **others)
    _, n = rule.loop()
    scaled = (grad.float() * n.grad_scale).double()
    second.copy_(before.double() * n.v_factor + scaled * scaled * n.v_weight)


@pytest.fixture(autouse=True)
def _asks_anew(monkeypatch):
    monkeypatch.setattr(on_device, "_COMPILED_FOR", ("cpu",))
    on_device._serving.cache_clear()
    yield
    on_device._serving.cache_clear()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("loop", Loop)
def test_other_bits_are_found(loop, form) -> None:
    assert on_device.agrees(update_in_torch, CPU, loop, form)
    assert not on_device.agrees(rounds_once, CPU, loop, form)


@pytest.mark.parametrize("kernel", [None, SimpleNamespace(update_in_triton=rounds_once)], ids=["none", "wrong"])
def test_torch_serves_where_no_kernel_can_and_says_so_once(kernel, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", kernel)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert on_device._serving(CPU, Loop.ADAMW, FORMS[0]) is update_in_torch
    assert caplog.text.count("made by torch's operators, which is slower") == 1


def test_a_kernel_with_the_right_bits_serves(monkeypatch) -> None:
    def right(*args: Any, **others: Any) -> None:
        update_in_torch(*args, **others)

    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", SimpleNamespace(update_in_triton=right))
    assert on_device._serving(CPU, Loop.LION, FORMS[1]) is right
