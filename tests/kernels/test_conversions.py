"""Splitting masters and storing gradients."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from infinity import kernels
from infinity.kernels import grad_stats, grad_store, join_master, split_master
from tests.kernels.data import CHUNK, same_bits, wild

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = float("inf"), float("nan")


def all_top_halves(low: int) -> torch.Tensor:
    """Every sign, exponent and leading fraction bit of fp32, with the same low 16 bits."""
    patterns = (np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(low)
    return torch.from_numpy(patterns.view(np.float32))


@pytest.mark.parametrize("name", kernels.instruction_sets())
@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_a_split_master_comes_back_exactly(name: str, low: int) -> None:
    kernels.use_instruction_set(name)
    master = all_top_halves(low)
    param = torch.empty(master.numel(), dtype=torch.bfloat16)
    low_bits, joined = torch.empty(master.numel(), dtype=torch.int16), torch.empty(master.numel())
    split_master(master, param, low_bits)
    join_master(param, low_bits, joined)
    number = ~master.isnan()
    assert same_bits(joined[number], master[number])
    assert joined[~number].isnan().all()
    assert param[~number].isnan().all()
    if low != 0x8000:  # exactly between two bfloat16, where torch goes to even
        assert same_bits(param[number], master[number].bfloat16())
    else:
        finite = param.isfinite() & number
        assert torch.equal(
            (param.double() - master.double()).abs()[finite],
            (master.bfloat16().double() - master.double()).abs()[finite],
        )


@pytest.mark.parametrize("name", kernels.instruction_sets())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_converts_as_in_torch(name: str, dtype: torch.dtype) -> None:
    kernels.use_instruction_set(name)
    narrow = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
    wide = torch.empty(narrow.numel())
    grad_store(wide, narrow, accumulate=False)
    number = ~narrow.isnan()
    assert same_bits(wide[number], narrow.float()[number])
    assert wide[~number].isnan().all()
    for low in (0x0000, 0x0FFF, 0x1000, 0x1001, 0x8000, 0x8001, 0xFFFF):
        source = all_top_halves(low)
        back = torch.empty(source.numel(), dtype=dtype)
        grad_store(back, source, accumulate=False)
        number = ~source.isnan()
        assert same_bits(back[number], source[number].to(dtype))
        assert back[~number].isnan().all()


@pytest.mark.parametrize(("dst_dtype", "src_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("accumulate", [False, True], ids=["copy", "accumulate"])
def test_grad_store_matches_float64(dst_dtype: torch.dtype, src_dtype: torch.dtype, accumulate: bool) -> None:
    for numel in (*range(1, 50), 511, 512, 513, CHUNK + 5):
        generator = torch.Generator().manual_seed(numel)
        dst = torch.randn(numel, generator=generator).to(dst_dtype)
        src = torch.randn(numel, generator=generator).to(src_dtype)
        before = dst.clone()
        stats = grad_store(dst, src, accumulate=accumulate, scale=0.5)
        exact = src.double() * 0.5 + (before.double() if accumulate else 0.0)
        assert same_bits(dst, exact.float().to(dst_dtype)) or torch.allclose(
            dst.double(), exact, rtol=torch.finfo(dst_dtype).eps, atol=1e-7
        )
        assert stats.finite
        assert stats.sum_sq == pytest.approx(float(dst.double().square().sum()), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_do_not_depend_on_threads_or_instruction_set(dtype: torch.dtype) -> None:
    src = torch.randn(7 * CHUNK + 13, generator=torch.Generator().manual_seed(0)).to(dtype)
    dst = torch.empty_like(src)
    sums = set()
    for name in kernels.instruction_sets():
        kernels.use_instruction_set(name)
        for threads in (1, 2, 5):
            kernels.set_threads(threads)
            sums.add(grad_store(dst, src, accumulate=False).sum_sq)
    assert len(sums) == 1


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("position", [0, 511, 512, CHUNK - 1, CHUNK, 2 * CHUNK + 2])
def test_one_non_finite_value_is_noticed_wherever_it_is(bad: float, position: int) -> None:
    src = torch.ones(2 * CHUNK + 3)
    dst = torch.empty_like(src)
    assert grad_store(dst, src, accumulate=False).finite
    src[position] = bad
    assert not grad_store(dst, src, accumulate=False).finite


def test_finite_is_about_what_was_stored() -> None:
    huge = torch.full((4,), 3e38)
    assert grad_store(torch.empty(4), huge, accumulate=False).finite  # squares sum up in double
    assert not grad_store(huge.clone(), huge, accumulate=True).finite  # the sum overflows
    assert not grad_store(torch.empty(4, dtype=torch.float16), torch.full((4,), 7e4), accumulate=False).finite
    assert grad_store(torch.empty(4, dtype=torch.float16), torch.full((4,), 7e4), accumulate=False, scale=0.5).finite


def test_wild_values_accumulate_as_in_torch() -> None:
    dst, src = wild(5000, 1), wild(5000, 2)
    expected = dst + src
    grad_store(dst, src, accumulate=True)
    assert same_bits(dst, expected)


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    sources = [torch.full((4 * CHUNK,), float(value)) for value in range(4)]
    sums: dict[int, list[float]] = {value: [] for value in range(4)}

    def work(value: int) -> None:
        dst = torch.empty_like(sources[value])
        for _ in range(20):
            sums[value].append(grad_store(dst, sources[value], accumulate=False).sum_sq)

    kernels.set_threads(3)
    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value, found in sums.items():
        assert found == [float(value * value * 4 * CHUNK)] * 20


def test_a_wrong_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"^src has 3 elements where 4 are expected"):
        grad_store(torch.zeros(4), torch.zeros(3), accumulate=False)
    with pytest.raises(ValueError, match=r"^low_bits is torch\.int32"):
        split_master(torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(4, dtype=torch.int32))


def test_gradients_are_measured_whatever_the_default_device() -> None:
    values = wild(100, 5)
    with torch.device("meta"):  # as "cuda", which is not everywhere
        assert grad_stats(values).sum_sq == pytest.approx(values.double().square().sum().item())
