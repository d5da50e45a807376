"""Gradients that are told from the first moment before and after an update."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from infinity import kernels
from infinity.kernels import (
    AdagradHyper,
    Aside,
    Hyper,
    Lost,
    Moment,
    can_reconstruct,
    reconstruct_grad,
    reconstruct_params,
    split_master,
    update,
)
from infinity.memory.mapping import make_mapping, tensor_at
from tests.kernels.data import CHUNK, HYPER, same_bits, wild

NARROW = [torch.bfloat16, torch.float16]
RULES = [
    HYPER,
    dataclasses.replace(HYPER, grad_scale=0.37),
    dataclasses.replace(HYPER, grad_scale=2.0**-16),
    dataclasses.replace(HYPER, beta1=0.3),
    dataclasses.replace(HYPER, beta1=0.0),
    dataclasses.replace(HYPER, decoupled=False, weight_decay=0.0),
]


def updated(
    rule: Hyper, first: torch.Tensor, grad: torch.Tensor, *, aside: bool
) -> tuple[torch.Tensor, list[int] | None]:
    """The first moment after an update, and what it says is lost."""
    numel = grad.numel()
    param, second, moment = torch.ones(numel), torch.ones(numel), first.clone()
    after = torch.empty(numel) if aside else moment
    beside = Aside(first=Moment(after), second=Moment(torch.empty(numel))) if aside else None
    lost = update(rule, param, grad, first=Moment(moment), second=Moment(second), aside=beside, report_lost=True)
    assert lost is not None
    assert not lost.params
    return after, lost.grads


def check(rule: Hyper, first: torch.Tensor, grad: torch.Tensor, *, aside: bool = False) -> int:
    """All but what is said to be lost comes back, which is counted."""
    after, lost = updated(rule, first, grad, aside=aside)
    assert lost is not None
    assert lost == sorted(set(lost))
    found = torch.empty_like(grad)
    reconstruct_grad(rule, first, after, found)
    assert {int(place) for place in (found.view(torch.int16) != grad.view(torch.int16)).nonzero()} <= set(lost)
    found[lost] = grad[lost]
    assert same_bits(found, grad)
    return len(lost)


@pytest.mark.parametrize("aside", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_does_not_come_back_is_named(dtype, rule, aside) -> None:
    """Also of gradients beside which the moment is anything: short ones, so that all may be lost."""
    for numel in (1, 2, 127, 128, 129, 200):
        check(rule, wild(numel, 1), wild(numel, 2, dtype), aside=aside)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 3e-4), (torch.float16, 5e-3)], ids=str)
def test_of_a_training_few_are_lost(dtype, most) -> None:
    """The moment of a hundred steps with gradients around a mean, and rows that have none for a while."""
    generator = torch.Generator().manual_seed(0)
    numel, lost = 3 * CHUNK + 1000, 0
    scale = 10.0 ** (6 * torch.rand(numel, generator=generator) - 7)
    mean = torch.randn(numel, generator=generator)
    first = torch.zeros(numel)
    rule = dataclasses.replace(HYPER, grad_scale=1.0)
    for step in range(30):
        grad = (scale * (torch.randn(numel, generator=generator) + mean)).to(dtype)
        grad[step * 1000 : step * 1000 + 50_000] = 0.0
        lost += check(rule, first, grad)
        first, _ = updated(rule, first, grad, aside=False)
    assert 0 < lost < most * 30 * numel


def just_large_enough(first: torch.Tensor, weight: float, dtype: torch.dtype, factor: float) -> torch.Tensor:
    """Gradients that are `factor` times the least beside which no moment is in doubt, of either sign."""
    steps = 2.0**-15 if dtype == torch.bfloat16 else 2.0**-12
    least = first.abs().double() * 1.25 * (6 + 1 / weight) * steps
    signs = torch.sign(torch.randn(first.numel(), generator=torch.Generator().manual_seed(5)))
    return (signs * least * factor).to(dtype)


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.6, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gradients_that_are_just_large_enough_come_back(dtype, beta1) -> None:
    """Of whole blocks that are not tried out, see [Note: doubt]; and of such that just are."""
    rule = dataclasses.replace(HYPER, beta1=beta1, grad_scale=1.0)
    for seed in range(8):
        scale = 1e-3 * (1 + torch.rand(256, generator=torch.Generator().manual_seed(seed)))
        for factor in (0.1, 0.2, 0.3, 0.5, 0.7, 0.97, 1.005, 1.02, 1.5, 4.0):
            check(rule, scale, just_large_enough(scale, 1 - beta1, dtype, factor))


@pytest.mark.parametrize(
    "change",
    [
        {"grad_scale": 2.0**-130},
        {"grad_scale": 2.0**90},
        {"beta1": 1 - 2.0**-14},
        {"beta1": 1.5},
        {"beta2": 1 - 2.0**-45},
        {"lr": 40.0, "weight_decay": 0.02},
        {"lr": 50.0, "weight_decay": 0.02},  # nothing is left of the parameters
        {"lr": 400.0, "weight_decay": 0.02},
        {"lr": -40.0, "weight_decay": 0.02},
    ],
    ids=str,
)
def test_rules_of_unusual_size(change) -> None:
    """Nothing is taken for granted then."""
    rule, numel = dataclasses.replace(HYPER, **change), 256
    one = 1 + torch.rand(numel, generator=torch.Generator().manual_seed(2))
    param, low_bits = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_master(1e-3 * one, param, low_bits)
    for power in (-120, -100, -80, -60, 0, 60, 80, 100, 120):
        grad = (one.flip(0) * 2.0**power).bfloat16()
        for of_grad in (2.0**-20, 1.0, 2.0**6):
            first = one * 2.0**power * rule.grad_scale * of_grad
            check(rule, first, grad)
            state = {"param": param, "low_bits": low_bits, "first": first, "second": (first * first) + 1e4}
            check_params(rule, state, grad)


def test_parameters_that_are_nearly_nothing_or_zero_of_either_sign() -> None:
    """Beside moments that are zeros, too: whether what comes out is above or below zero tells nothing."""
    rule = dataclasses.replace(HYPER, lr=1.0, weight_decay=0.4)
    for bits in (0, 1, 2, 3):
        for sign in (0, -(2**31)):
            master = torch.full((256,), bits + sign, dtype=torch.int32).view(torch.float32)
            param, low_bits = torch.empty(256, dtype=torch.bfloat16), torch.empty(256, dtype=torch.int16)
            split_master(master, param, low_bits)
            for zero in (0.0, -0.0):
                first = torch.full((256,), zero)
                state = {"param": param, "low_bits": low_bits, "first": first, "second": torch.ones(256)}
                check_params(rule, state, first.bfloat16())


@pytest.mark.parametrize("power", [-148, -126, -100, -50, 50, 100, 125])
def test_numbers_of_any_size(power) -> None:
    """Moments, gradients and parameters of one size each, so that whole blocks might be taken for safe."""
    numel, size = 256, 2.0**power
    generator = torch.Generator().manual_seed(power)
    one = 1 + torch.rand(numel, generator=generator)
    for other in (-148, -100, 0, 100, 125):
        rule = dataclasses.replace(HYPER, grad_scale=1.0)
        check(rule, one * size, (one * 2.0**other).bfloat16())
        param, low_bits = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        split_master(one.flip(0) * size, param, low_bits)
        state = {"param": param, "low_bits": low_bits, "first": one * 2.0**other, "second": one * 1e-30}
        for lr in (1e-10, 1e-3, 1e3):
            check_params(dataclasses.replace(rule, lr=lr, weight_decay=0.0), state, one.bfloat16())
            check_params(dataclasses.replace(rule, lr=lr, weight_decay=0.0), state, torch.zeros(numel).bfloat16())


def test_parameters_that_an_update_moves_as_far_as_it_may() -> None:
    numel = 8 * CHUNK
    param, low_bits = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    generator = torch.Generator().manual_seed(1)
    split_master(1e-3 * (1 + 1e-3 * torch.rand(numel, generator=generator)), param, low_bits)
    state = {"param": param, "low_bits": low_bits, "first": torch.full((numel,), 1e-3), "second": torch.ones(numel)}
    grad = torch.full((numel,), 1e-3).bfloat16()
    for way in (0.5, 0.99, 1.01, 8.0, 30.0, 60.0):  # of 2^12 parameters
        rule = dataclasses.replace(HYPER, lr=way * 2**12, weight_decay=0.0, step=10**6)
        check_params(rule, state, grad)


def test_of_gradients_that_vanish_beside_the_moment_not_all_are_named() -> None:
    first, grad = torch.ones(CHUNK + 1), torch.full((CHUNK + 1,), 1e-12).bfloat16()
    assert updated(HYPER, first, grad, aside=False)[1] is None


def test_gradients_that_are_not_finite() -> None:
    grad = torch.tensor([1.0, float("inf"), float("nan"), 0.0, -0.0]).bfloat16()
    check(HYPER, torch.zeros(5), grad)
    check(HYPER, torch.full((5,), float("inf")), grad)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_gradients_and_moments_that_are_no_numbers_of_any_kind(dtype) -> None:
    """What else is in a NaN is another matter in a gradient of 16 bits, in a moment and after rounding."""
    first = torch.tensor([0x7FC00000 + low for low in (0, 1, 0x1001, 0x7FFF, 0x8000, 0xFFFF)], dtype=torch.int32)
    high = 0x7FC0 if dtype == torch.bfloat16 else 0x7E00
    for low in (0, 1, 2, 0x20):
        grad = torch.full((6,), high + low, dtype=torch.int16).view(dtype)
        check(HYPER, first.view(torch.float32), grad)
        check(HYPER, torch.ones(6), grad)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_instruction_set_and_number_of_threads_finds_the_same(dtype) -> None:
    first, grad = wild(2 * CHUNK + 77, 1) * 1e-3, torch.randn(2 * CHUNK + 77).to(dtype)
    results = []
    for name in kernels.instruction_sets():
        for threads in (1, 2, 3):
            kernels.use_instruction_set(name)
            kernels.set_threads(threads)
            after, lost = updated(HYPER, first, grad, aside=False)
            found = torch.empty_like(grad)
            reconstruct_grad(HYPER, first, after, found)
            results.append((lost, found))
    for lost, found in results:
        assert lost == results[0][0]
        assert same_bits(found, results[0][1])


def split_state(numel: int) -> dict[str, torch.Tensor]:
    param, low_bits = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_master(wild(numel, 1), param, low_bits)
    return {"param": param, "low_bits": low_bits, "first": wild(numel, 2) * 1e-3, "second": wild(numel, 3).abs()}


def split_updated(
    rule: Hyper, before: dict[str, torch.Tensor], grad: torch.Tensor
) -> tuple[dict[str, torch.Tensor], Lost]:
    after = {name: values.clone() for name, values in before.items()}
    first, second = Moment(after["first"]), Moment(after["second"])
    update_of = {"master": after["low_bits"], "first": first, "second": second}
    lost = update(rule, after["param"], grad, **update_of, report_lost=True, params=True)
    assert lost is not None
    return after, lost


def put_back(rule: Hyper, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> torch.Tensor:
    param = after["param"].clone()
    reconstruct_params(rule, param, (before["low_bits"], after["low_bits"]), after["first"], after["second"])
    return param


def check_params(rule: Hyper, before: dict[str, torch.Tensor], grad: torch.Tensor) -> None:
    """All but what is said to be lost comes back."""
    after, lost = split_updated(rule, before, grad)
    found = put_back(rule, before, after)
    wrong = (found.view(torch.int16) != before["param"].view(torch.int16)).nonzero()
    assert {int(place) for place in wrong} <= set(lost.params)
    assert lost.params == sorted(set(lost.params))
    found.view(torch.int16)[lost.params] = torch.tensor(lost.param_bits, dtype=torch.uint16).view(torch.int16)
    assert same_bits(found, before["param"])


@pytest.mark.parametrize("rule", RULES[:5])
def test_parameters_that_do_not_come_back_are_named_with_their_bits(rule) -> None:
    for numel in (1, 2, 127, 128, 129, 200, CHUNK + 300):
        before, grad = split_state(numel), wild(numel, 4, torch.bfloat16)
        before["param"][::13] = before["param"].flip(0)[::13]  # written from outside: low bits of another
        check_params(rule, before, grad)


def test_of_a_training_few_parameters_are_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    numel = 2 * CHUNK + 100
    state = split_state(numel)
    split_master(0.02 * torch.randn(numel, generator=generator), state["param"], state["low_bits"])
    state["first"].zero_()
    state["second"].zero_()
    count = 0
    for step in range(1, 11):
        rule = dataclasses.replace(HYPER, lr=1e-3, step=step)
        grad = (1e-3 * torch.randn(numel, generator=generator)).bfloat16()
        after, lost = split_updated(rule, state, grad)
        count += len(lost.params)
        wrong = (put_back(rule, state, after).view(torch.int16) != state["param"].view(torch.int16)).nonzero()
        assert {int(place) for place in wrong} <= set(lost.params)
        state = after
    assert count < 1e-4 * 10 * numel


def test_parameters_are_the_same_with_every_instruction_set() -> None:
    before, grad = split_state(CHUNK + 77), torch.randn(CHUNK + 77).bfloat16()
    results = []
    for name in kernels.instruction_sets():
        kernels.use_instruction_set(name)
        after, lost = split_updated(HYPER, before, grad)
        results.append((lost, put_back(HYPER, before, after)))
    for lost, found in results:
        assert lost == results[0][0]
        assert same_bits(found, results[0][1])


def test_what_cannot_be_reconstructed_is_refused() -> None:
    coupled = dataclasses.replace(HYPER, decoupled=False)
    adagrad = AdagradHyper(lr=0.1, lr_decay=0.0, eps=1e-8, weight_decay=0.0, step=1)
    assert can_reconstruct(HYPER, torch.float32, torch.bfloat16)
    assert not can_reconstruct(HYPER, torch.bfloat16, torch.bfloat16)
    assert not can_reconstruct(HYPER, torch.float32, torch.float32)
    assert not can_reconstruct(coupled, torch.float32, torch.bfloat16)
    assert not can_reconstruct(adagrad, None, torch.bfloat16)
    with pytest.raises(ValueError, match="gradients of dtype"):
        updated(HYPER, torch.zeros(4), torch.zeros(4), aside=False)
    with pytest.raises(ValueError, match="params of dtype"):
        update(
            HYPER,
            *(torch.zeros(4), torch.zeros(4).bfloat16()),
            first=Moment(torch.zeros(4)),
            second=Moment(torch.zeros(4)),
            report_lost=True,
            params=True,
        )
    with pytest.raises(ValueError, match="before has"):
        reconstruct_grad(HYPER, torch.zeros(3), torch.zeros(4), torch.zeros(4).bfloat16())


def test_more_elements_than_positions_count_are_refused() -> None:
    numel = (1 << 32) + 1
    memory = make_mapping(4 * numel, 4096)  # of which nothing is read
    wide = tensor_at(memory.address, 4 * numel, memory).view(torch.float32)
    narrow = wide.view(torch.bfloat16)[:numel]
    with pytest.raises(ValueError, match="gradients of at most"):
        update(HYPER, wide, narrow, first=Moment(wide), second=Moment(wide), report_lost=True)
