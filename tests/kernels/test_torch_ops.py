"""An update in torch's operators, or in Triton's kernel, has the bits of the native kernels."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import kernels
from infinity.kernels import AdagradHyper, LionHyper, Moment, Rule, SgdHyper, on_device, split_master, torch_ops, update
from infinity.kernels.on_device import Update
from tests.kernels.data import HYPER, wild

RULES: dict[str, Rule] = {
    "adamw": dataclasses.replace(HYPER, grad_scale=0.37),
    "adam": dataclasses.replace(HYPER, decoupled=False),
    "adamw of little memory": dataclasses.replace(HYPER, beta1=0.3),
    "adagrad": AdagradHyper(lr=1e-2, lr_decay=1e-3, eps=1e-10, weight_decay=0.1, step=3),
    "lion": LionHyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, step=3),
    "sgd": SgdHyper(lr=1e-2, momentum=0.9, weight_decay=0.1, step=3),
    "nesterov": SgdHyper(lr=1e-2, momentum=0.9, weight_decay=0.0, step=3, nesterov=True),
}
GRADS = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = {"fp32": torch.float32, "split": torch.bfloat16, "master": torch.float16}
SPECIAL = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, -1e-45, 65504.0, 65520.0, 1e38])


def values(numel: int, seed: int) -> torch.Tensor:
    """Wild ones, with what is special in other places for every seed."""
    drawn = wild(numel, seed)
    places = torch.arange(len(SPECIAL)) * (seed + 5) + seed
    here = places < numel
    drawn[places[here]] = SPECIAL[here]
    return drawn


def stored(name: str, numel: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A parameter and what lies beside it; every ninth was written from outside."""
    master = values(numel, 1)
    param = torch.empty(numel, dtype=FORMATS[name])
    if name == "split":
        beside = torch.empty(numel, dtype=torch.int16)
        split_master(master, param, beside)
    else:
        param.copy_(master)
        beside = master if name == "master" else None
    param[::9] = values(numel, 6)[::9].to(param.dtype)
    return param, beside


def moments(rule: Rule, numel: int) -> list[torch.Tensor | None]:
    return [
        values(numel, 2) if rule.first is not None else None,
        values(numel, 3).abs() if rule.second is not None else None,
    ]


def assert_same(left: torch.Tensor, right: torch.Tensor, what: str) -> None:
    """The same bits, but for the payload of NaN."""
    if left.is_floating_point():
        assert torch.equal(left.isnan(), right.isnan()), what
        left, right = left.masked_fill(left.isnan(), 0), right.masked_fill(right.isnan(), 0)
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), what


def assert_native_bits(run: Update, rule: Rule, form: str, grad_dtype: torch.dtype, numel: int) -> None:
    grad = values(numel, 4).to(grad_dtype)
    states = [*stored(form, numel), *moments(rule, numel)]
    ours, native = ([None if state is None else state.clone() for state in states] for _ in range(2))
    run(rule, ours[0], grad, master=ours[1], first=ours[2], second=ours[3])
    first, second = (None if moment is None else Moment(moment) for moment in native[2:])
    update(rule, native[0], grad, master=native[1], first=first, second=second)
    names = ("param", "master", "first moment", "second moment")
    for name, left, right in zip(names, ours, native, strict=True):
        if left is not None and name == "master" and form == "split":
            known = ~ours[0].isnan()  # the low bits of a NaN are its payload
            left, right = left[known], right[known]
        if left is not None:
            assert_same(left, right, f"{name} of {numel}")


@pytest.mark.parametrize("piece", [1 << 24, 13], ids=["whole", "in pieces"])
@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_same_bits(rule, form, grad_dtype, piece, monkeypatch) -> None:
    monkeypatch.setattr(torch_ops, "_ELEMENTS", piece)
    for numel in (0, 1, 7, 255, 257, 4099) if piece > 13 else (41,):
        assert_native_bits(kernels.update_in_torch, rule, form, grad_dtype, numel)


class ComputesInWhatItWrites(TorchDispatchMode):
    """Refuses operators that are told to write another dtype than they read. On CUDA some of them, shifts among them,
    then compute in the dtype that they write; on the CPU none does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (kwargs or {}).get("out")
        if out is not None:
            read = {each.dtype for each in args if isinstance(each, torch.Tensor) and each.dim()}
            assert read <= {out.dtype}, f"{func} reads {read} and writes {out.dtype}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_operators_write_the_dtype_that_they_compute_in(rule, form) -> None:
    param, beside = stored(form, 257)
    first, second = moments(rule, 257)
    with ComputesInWhatItWrites():
        kernels.update_in_torch(
            rule, param, values(257, 4).to(torch.bfloat16), master=beside, first=first, second=second
        )


@pytest.fixture
def in_triton(monkeypatch) -> Any:
    """The module with Triton's kernels, interpreted; how a GPU's compiler rounds is another question."""
    pytest.importorskip("triton", reason="pip install triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "infinity.kernels.triton_ops", raising=False)
    found = importlib.import_module("infinity.kernels.triton_ops")
    monkeypatch.delitem(sys.modules, "infinity.kernels.triton_ops")
    return found


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinities are meant
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_same_bits_in_triton(rule, form, in_triton) -> None:
    for grad_dtype in GRADS:
        for numel in (0, 1, 257, 4099):
            assert_native_bits(in_triton.update_in_triton, rule, form, grad_dtype, numel)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # infinities are meant
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_the_norm_in_triton(dtype, in_triton) -> None:
    assert on_device.measures(in_triton.norm_in_triton, torch.device("cpu"), dtype)
    values = torch.randn(3, 8192 + 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for each in (values, values[0], values[0, 0], values[0, :0], values[:, ::2]):
        torch.testing.assert_close(in_triton.norm_in_triton(each), each.double().norm(), rtol=1e-13, atol=0)


def test_the_gradient_and_what_is_not_updated_stay(monkeypatch) -> None:
    grad = values(100, 4)
    before = grad.clone()
    param, low_bits = stored("split", 100)
    first, second = moments(HYPER, 100)
    kernels.update_in_torch(
        HYPER, param[10:20], grad[10:20], master=low_bits[10:20], first=first[10:20], second=second[10:20]
    )
    assert_same(grad, before, "gradient")
    assert_same(first[20:], values(100, 2)[20:], "first moment")
