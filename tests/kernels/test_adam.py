"""One update: the same bits whatever runs it, and torch's numbers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from infinity import kernels
from infinity.kernels import Hyper, Moment, join_master, split_master, update
from tests.kernels.data import CHUNK, HYPER, bits, same_bits, shifted, wild

GRAD_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUPLED = dataclasses.replace(HYPER, decoupled=False)
State = dict[str, torch.Tensor]


def make_state(numel: int, split: bool) -> State:
    master = wild(numel, seed=1)
    state = {"exp_avg": wild(numel, seed=2), "exp_avg_sq": wild(numel, seed=3).abs()}
    if not split:
        return {"param": master, **state}
    param, low_bits = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_master(master, param, low_bits)
    return {"param": param, "low_bits": low_bits, **state}


def run(state: State, grad: torch.Tensor, hyper: Hyper) -> None:
    moments = {"first": Moment(state["exp_avg"]), "second": Moment(state["exp_avg_sq"])}
    update(hyper, state["param"], grad, master=state.get("low_bits"), **moments)


def updated(state: State, grad: torch.Tensor, hyper: Hyper, place: Callable[[torch.Tensor], torch.Tensor]) -> State:
    copy = {name: place(tensor) for name, tensor in state.items()}
    run(copy, place(grad), hyper)
    return copy


def assert_same(left: State, right: State, what: object) -> None:
    for name, tensor in left.items():
        assert same_bits(tensor, right[name]), f"{name} differs: {what}"


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES, ids=str)
@pytest.mark.parametrize("hyper", [HYPER, COUPLED], ids=["decoupled", "coupled"])
def test_every_length_and_instruction_set_gives_the_same_bits(
    split: bool, grad_dtype: torch.dtype, hyper: Hyper
) -> None:
    for numel in range(1, 301):
        state, grad = make_state(numel, split), wild(numel, 4, grad_dtype)
        kernels.use_instruction_set("baseline")
        expected = updated(state, grad, hyper, torch.clone)
        for name in kernels.instruction_sets()[1:]:
            kernels.use_instruction_set(name)
            assert_same(updated(state, grad, hyper, torch.clone), expected, (numel, name))


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_every_alignment_gives_the_same_bits(split: bool, name: str) -> None:
    kernels.use_instruction_set(name)
    for numel in (1, 31, 600):
        state, grad = make_state(numel, split), wild(numel, 4, torch.bfloat16)
        expected = updated(state, grad, HYPER, torch.clone)
        for elements in range(1, 33):
            moved = updated(state, grad, HYPER, lambda tensor, by=elements: shifted(tensor, by))
            assert_same(moved, expected, (numel, elements))


@pytest.mark.parametrize("split", [False, True], ids=["fp32", "split"])
def test_every_thread_count_and_cut_gives_the_same_bits(split: bool) -> None:
    numel = 5 * CHUNK + 77
    state, grad = make_state(numel, split), wild(numel, 4)
    kernels.set_threads(1)
    expected = updated(state, grad, HYPER, torch.clone)
    for threads in (2, 3, 8):
        kernels.set_threads(threads)
        assert_same(updated(state, grad, HYPER, torch.clone), expected, f"{threads} threads")
    cut = {name: tensor.clone() for name, tensor in state.items()}
    for start, stop in ((0, 1), (1, 700), (700, CHUNK + 3), (CHUNK + 3, numel)):
        run({name: tensor[start:stop] for name, tensor in cut.items()}, grad[start:stop], HYPER)
    assert_same(cut, expected, "cut into pieces")


def test_flushing_denormals_in_the_calling_thread_changes_nothing() -> None:
    state, grad = make_state(4096, split=False), wild(4096, 4)
    expected = updated(state, grad, HYPER, torch.clone)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = {name: tensor.clone() for name, tensor in state.items()}
        run(flushed, grad, HYPER)
    finally:
        torch.set_flush_denormal(False)
    assert_same(flushed, expected, "flush_denormal")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "for-each"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.9)], ids=str)
def test_a_hundred_steps_follow_torch(
    fused: bool, decoupled: bool, weight_decay: float, betas: tuple[float, float]
) -> None:
    numel, lr = 4001, 1e-3
    param = wild(numel, 1)
    reference = torch.nn.Parameter(param.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([reference], lr=lr, betas=betas, weight_decay=weight_decay, fused=fused, foreach=not fused)
    exp_avg, exp_avg_sq, largest = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    state = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for step in range(1, 101):
        grad = wild(numel, 100 + step)
        largest = torch.maximum(largest, grad.abs())
        reference.grad = grad.clone()
        optimizer.step()
        hyper = Hyper(lr, *betas, 1e-8, weight_decay, step, decoupled)
        run(state, grad, hyper)
    # Where terms of opposite sign cancel, a result is only as exact as the terms: steps of up to `lr` for a parameter
    # (a hundred of them; the bound is a ten-millionth of the way), the largest gradient for a moment.
    moments = optimizer.state[reference]
    torch.testing.assert_close(exp_avg_sq, moments["exp_avg_sq"], rtol=1e-6, atol=1e-44)
    torch.testing.assert_close(param, reference.detach(), rtol=1e-6, atol=1e-5 * lr)
    assert ((exp_avg - moments["exp_avg"]).abs() <= 1e-6 * largest + 1e-43).all()


def test_split_equals_fp32_over_a_thousand_steps() -> None:
    numel = 3000
    whole, parts = make_state(numel, split=False), make_state(numel, split=True)
    for state in (whole, parts):
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    joined = torch.empty(numel)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 1001):
        grad = torch.randn(numel, generator=generator).bfloat16()
        hyper = dataclasses.replace(HYPER, step=step)
        run(whole, grad, hyper)
        run(parts, grad, hyper)
    join_master(parts["param"], parts["low_bits"], joined)
    assert_same(whole, parts | {"param": joined}, "split")


def test_grad_scale_multiplies_the_gradient() -> None:
    numel = 1000
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    state = make_state(numel, split=False)
    scaled = updated(state, grad, dataclasses.replace(HYPER, grad_scale=0.25), torch.clone)
    assert_same(scaled, updated(state, grad * 0.25, HYPER, torch.clone), "grad_scale")


def test_zero_coupled_decay_keeps_an_infinite_weight_out_of_the_moments() -> None:
    state = make_state(8, split=False)
    state["param"].fill_(float("inf"))
    run(state, torch.ones(8), dataclasses.replace(COUPLED, weight_decay=0.0))
    assert torch.isfinite(state["exp_avg"]).all()


def test_non_finite_gradients_reach_the_weight_in_both_formats() -> None:
    grad = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    for split in (False, True):
        state = make_state(4, split)
        state["param"].fill_(1.0)
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
        run(state, grad, HYPER)
        assert state["param"].isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("param", torch.zeros(8, dtype=torch.float64)),
        ("exp_avg", torch.zeros(8, dtype=torch.bfloat16)),
        ("exp_avg_sq", torch.zeros(7)),
        ("grad", torch.zeros(16)[::2]),
        ("grad", torch.zeros(8, device="meta")),
        ("grad", torch.zeros(8, dtype=torch.int32)),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, broken: torch.Tensor) -> None:
    tensors = {key: torch.zeros(8) for key in ("param", "exp_avg", "exp_avg_sq", "grad")}
    tensors[name] = broken
    with pytest.raises(ValueError, match=f"^{name} "):
        run(tensors, tensors["grad"], HYPER)


def test_the_environment_chooses_the_instruction_set() -> None:
    script = "from infinity import kernels; print(kernels.active_instruction_set())"
    environment = {**os.environ, "INFINITY_ISA": "baseline"}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "baseline"
    with pytest.raises(ValueError, match="choose one of baseline"):
        kernels.use_instruction_set("sse9")


def test_an_empty_tensor_is_fine() -> None:
    empty = torch.empty(0)
    run({"param": empty, "exp_avg": empty, "exp_avg_sq": empty}, empty, HYPER)
    assert bits(empty).numel() == 0
