"""8-bit moments: what a code means, and the same codes from every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from infinity import kernels
from infinity.kernels import SCALE_BLOCK, Dither, Moment, load_moment, store_moment
from tests.kernels.data import same_bits

BLOCKS = 400
SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])


def code_values(signed: bool) -> torch.Tensor:
    """What the 256 codes stand for, by the definition in quantize.h, in float64."""
    code = torch.arange(256)
    sign = torch.where(code >= 128, -1.0, 1.0).double() if signed else torch.ones(256).double()
    magnitude = code & 127 if signed else code
    exponent, fraction = magnitude >> 4, (magnitude & 15).double() / 16
    lowest = -6 if signed else -14
    normal = (1 + fraction) * torch.exp2((exponent - 1 + lowest).double())
    return sign * torch.where(exponent == 0, fraction * 2.0**lowest, normal)


def scales() -> torch.Tensor:
    """From zero and denormals to the largest float, and NaN: each exponent with four fractions."""
    patterns = (np.arange(255, dtype=np.uint32) << 23)[:, None] | np.array([0, 1, 0x2AAAAA, 0x7FFFFF], dtype=np.uint32)
    return torch.cat([torch.from_numpy(patterns.ravel().view(np.float32)), torch.tensor([float("nan")])])


def random_blocks(signed: bool) -> torch.Tensor:
    """Blocks whose exponents are spread over all of fp32, over twenty, or not at all, with zeros among them."""
    rng = np.random.default_rng(7 + signed)
    spread = rng.choice([0, 3, 20, 254], size=(BLOCKS, 1))
    top = rng.integers(0, 255, size=(BLOCKS, 1))
    exponents = np.clip(top - rng.integers(0, spread + 1, size=(BLOCKS, SCALE_BLOCK)), 0, 254).astype(np.uint32)
    patterns = exponents << 23 | rng.integers(0, 1 << 23, size=exponents.shape, dtype=np.uint32)
    patterns[rng.random(patterns.shape) < 1 / 16] = 0
    if signed:
        patterns |= rng.integers(0, 2, size=patterns.shape, dtype=np.uint32) << 31
    patterns[:10] &= 0x80000000  # zeros alone
    values = torch.from_numpy(patterns.view(np.float32))
    values[10, 37] = values[11, -1] = float("inf")
    values[12, 37] = values[13, -1] = float("nan")
    return values.reshape(-1)


def stored(values: torch.Tensor, signed: bool, seed: int = 0) -> Moment:
    numel = values.numel()
    moment = Moment(torch.full((numel,), 0xEE, dtype=torch.uint8), torch.full((-(-numel // SCALE_BLOCK),), -1.0))
    store_moment(moment, values, signed=signed, dither=Dither(seed=seed, index=SCALE_BLOCK * seed))
    return moment


def scales_of(moment: Moment) -> torch.Tensor:
    assert moment.scales is not None
    return moment.scales


@SIGNED
@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_every_code_means_what_is_documented_at_every_scale(name: str, signed: bool) -> None:
    kernels.use_instruction_set(name)
    scale = scales()
    codes = torch.arange(256).to(torch.uint8).repeat(scale.numel())
    found = load_moment(Moment(codes, scale), signed=signed).view(-1, 256)
    exact = (code_values(signed).float() * scale[:, None]).float()
    number = ~scale.isnan()
    assert same_bits(found[number], exact[number])
    assert found[~number].isnan().all()


@SIGNED
def test_random_blocks_get_the_same_codes_from_every_instruction_set(signed: bool) -> None:
    values = random_blocks(signed)
    for seed in range(8):
        for numel in (values.numel(), values.numel() - 1, values.numel() - 16 - seed):
            found = []
            for name in kernels.instruction_sets():
                kernels.use_instruction_set(name)
                found.append(stored(values[:numel], signed, seed))
            for moment in found[1:]:
                assert same_bits(moment.values, found[0].values)
                assert same_bits(scales_of(moment), scales_of(found[0]))


@SIGNED
@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_a_code_that_is_stored_again_stays(name: str, signed: bool) -> None:
    """What a code stands for is not rounded: with the largest code beside it, its scale comes back too."""
    kernels.use_instruction_set(name)
    top = 127 if signed else 255
    for scale in (1e-20, 2.0**-9, 1.0, 3e7):
        before = Moment(torch.arange(256).to(torch.uint8), torch.tensor([scale]))
        if signed:
            before.values[128] = 0  # minus zero
        after = stored(load_moment(before, signed=signed), signed, seed=3)
        assert int(after.values[top]) == top
        difference = (after.values.int() - before.values.int()).abs()
        assert int(difference.max()) <= 1  # scale * 1.9375 / 1.9375 may be rounded itself
        if scale in (2.0**-9, 1.0):
            assert same_bits(after.values, before.values)


@SIGNED
@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_storing_is_right_on_average_and_within_a_step(name: str, signed: bool) -> None:
    kernels.use_instruction_set(name)
    values = torch.linspace(0.01, 1.9375, SCALE_BLOCK) * (torch.tensor([1.0, -1.0]).repeat(128) if signed else 1.0)
    draws = torch.stack([load_moment(stored(values, signed, seed), signed=signed) for seed in range(2000)])
    step = torch.maximum(values.abs() / 16, torch.tensor(2.0**-10 if signed else 2.0**-18))
    assert ((draws - values).abs() <= step * 1.0001).all()
    assert ((draws.double().mean(0) - values).abs() <= step * 0.06).all()  # a step's deviation over sqrt(2000), 5 times


@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_a_second_moment_that_is_not_zero_is_never_stored_as_zero(name: str) -> None:
    kernels.use_instruction_set(name)
    values = torch.logspace(-30, 0, SCALE_BLOCK)
    values[::5] = 0.0
    for seed in range(20):
        assert torch.equal(stored(values, signed=False, seed=seed).values == 0, values == 0)


@pytest.mark.parametrize("name", kernels.instruction_sets())
def test_random_bits_depend_on_the_index_alone_beyond_32_bits(name: str) -> None:
    kernels.use_instruction_set(name)
    values = torch.linspace(0.01, 1.9375, 96)
    whole, parts = (Moment(torch.empty(96, dtype=torch.bfloat16)) for _ in range(2))
    cut, end = 32, 1 << 32
    store_moment(whole, values, signed=True, dither=Dither(5, end - cut))
    for here, index in ((slice(cut), end - cut), (slice(cut, None), end)):
        store_moment(Moment(parts.values[here]), values[here], signed=True, dither=Dither(5, index))
    assert same_bits(whole.values, parts.values)
