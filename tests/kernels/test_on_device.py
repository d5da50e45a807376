"""What updates states on a device has the bits of the host's kernels there, or is not used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from infinity.errors import InfinityError
from infinity.kernels import Hyper, Rule, on_device, update_in_torch
from infinity.kernels.on_device import norm_in_torch
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
    on_device._norm_serving.cache_clear()
    yield
    on_device._serving.cache_clear()
    on_device._norm_serving.cache_clear()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("loop", Loop)
def test_other_bits_are_found(loop, form) -> None:
    with torch.device("meta"):  # a script's default device changes nothing
        assert on_device.agrees(update_in_torch, CPU, loop, form)
    assert not on_device.agrees(rounds_once, CPU, loop, form)


@pytest.mark.parametrize("kernel", [None, SimpleNamespace(update_in_triton=rounds_once)], ids=["none", "wrong"])
def test_torch_serves_where_no_kernel_can_and_says_so_once(kernel, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", kernel)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert on_device._serving(CPU, Loop.ADAMW, FORMS[0]) is update_in_torch
    assert caplog.text.count("made by torch's operators, which is slower") == 1


@pytest.mark.parametrize("kernel", [None, SimpleNamespace(update_in_triton=rounds_once)], ids=["none", "wrong"])
def test_nothing_serves_where_torch_has_other_bits_too(kernel, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", kernel)
    monkeypatch.setattr(on_device, "update_in_torch", rounds_once)
    with pytest.raises(InfinityError, match=r"states cannot stay on cpu: .*ADAMW.*offload_optimizer\.device"):
        on_device._serving(CPU, Loop.ADAMW, FORMS[0])


def test_a_kernel_with_the_right_bits_serves_even_where_torch_has_others(monkeypatch) -> None:
    def right(*args: Any, **others: Any) -> None:
        update_in_torch(*args, **others)

    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", SimpleNamespace(update_in_triton=right))
    monkeypatch.setattr(on_device, "update_in_torch", rounds_once)
    assert on_device._serving(CPU, Loop.LION, FORMS[1]) is right


def test_kernels_are_tried_and_launched_with_their_tensors_device_current(monkeypatch) -> None:
    """Triton launches on the thread's current device, which need not be that of the tensors."""
    events: list[str] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        events.append(f"enter {device}")
        yield
        events.append("leave")

    def kernel(*args: Any, **others: Any) -> None:
        events.append("launch")
        update_in_torch(*args, **others)

    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", SimpleNamespace(update_in_triton=kernel))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=current))
    param, grad, first, second = torch.ones(4, 8)
    on_device.update_on_device(
        Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=True), param, grad, master=None, first=first, second=second
    )
    assert events[0] == "enter cpu"
    assert events[-1] == "leave"
    assert set(events[1:-1]) == {"launch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_measured_piece_by_piece(dtype, monkeypatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = torch.linalg.vector_norm(values, dtype=torch.float64)
    assert torch.equal(norm_in_torch(values), whole)
    assert torch.equal(norm_in_torch(values[0]), values[0].double().abs())  # a loss has no dimension
    assert on_device.measures(norm_in_torch, CPU, dtype)
    measured: list[int] = []
    norm = torch.linalg.vector_norm

    def recorded(piece: torch.Tensor, **how: Any) -> torch.Tensor:
        measured.append(piece.numel())
        return norm(piece, **how)

    monkeypatch.setattr(torch.linalg, "vector_norm", recorded)
    monkeypatch.setattr(on_device, "_PIECE", 64)
    torch.testing.assert_close(norm_in_torch(values), whole, rtol=1e-14, atol=0)
    assert max(measured) == 64


def norm_in_float32(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32).double()


def norm_of_the_finite(values: torch.Tensor) -> torch.Tensor:
    return norm_in_torch(values.nan_to_num(0.0, 0.0, 0.0))


@pytest.mark.parametrize("wrong", [norm_in_float32, norm_of_the_finite])
def test_a_norm_that_is_wrong_does_not_serve(wrong, monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", SimpleNamespace(norm_in_triton=wrong))
    assert on_device._norm_serving(CPU, torch.bfloat16) is norm_in_torch
    assert "norms of torch.bfloat16 on cpu are made by torch's operators" in caplog.text


def test_a_norm_that_is_right_serves(monkeypatch) -> None:
    def right(values: torch.Tensor) -> torch.Tensor:
        return norm_in_torch(values)

    monkeypatch.setitem(sys.modules, "infinity.kernels.triton_ops", SimpleNamespace(norm_in_triton=right))
    assert on_device._norm_serving(CPU, torch.float32) is right
