"""Rates of the processor: the optimizer in every state format, plain passes over memory, matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from infinity import kernels
from infinity.memory import FRESH_BYTES
from infinity.optim.bench import ROOFLINE, TRIAD, TRIAD_BYTES, AdamBenchJob, run_adam_bench, triad
from infinity.optim.formats import FORMATS

_ROUNDS = 5
_MATMUL_S = 0.4
_LEAST_ROWS, _MOST_ROWS = 64, 4096
Rates = dict[str, Any]


def thread_counts(most: int) -> list[int]:
    """Return the numbers of threads to measure: 1, `most`, and the powers of two between."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads of the optimizer's kernels and of torch in this context."""
    before = kernels.thread_count()
    kernels.set_threads(count)
    try:
        with kernels.torch_threads(count):
            yield
    finally:
        kernels.set_threads(before)


def optimizer_rates(numel: int, counts: list[int], progress: Callable[[str], None]) -> tuple[list[Rates], list[Rates]]:
    """Measure AdamW on `numel` parameters in every state format, and memory bandwidth, for several numbers of threads.

    Returns:
        The profile's `optimizer` and `memory`.
    """
    optimizer, memory = [], []
    for count in counts:
        with threads(count):
            job = AdamBenchJob(numel, count, FORMATS, (), None, _ROUNDS)
            in_place = 0.0
            for result in run_adam_bench(job, lambda _: None):
                rate = result.params_per_s(numel)
                if result.name == ROOFLINE:
                    in_place = rate * result.bytes_per_param
                if result.name in (ROOFLINE, TRIAD):
                    continue
                facts = {"format": result.name, "threads": count, "params_per_s": rate}
                optimizer.append({**facts, "bytes_per_s": rate * result.bytes_per_param})
            progress(f"optimizer, {count} threads")
            memory.append(
                {
                    "threads": count,
                    "triad_bytes_per_s": _triad_bytes_per_s(numel),
                    "in_place_bytes_per_s": in_place,
                    "fresh_bytes_per_s": _fresh_bytes_per_s(),
                }
            )
    return optimizer, memory


def _triad_bytes_per_s(numel: int) -> float:
    step = triad(torch.ones(numel))
    seconds = [step() for _ in range(_ROUNDS + 1)]
    return numel * TRIAD_BYTES / statistics.median(seconds[1:])


def _fresh_bytes_per_s() -> float:
    """Return the rate at which the system provides new memory: the first fill takes so much longer than the second."""
    seconds = []
    for _ in range(_ROUNDS):
        made = torch.empty(2 * FRESH_BYTES, dtype=torch.uint8)
        first_s, again_s = timed(made.zero_), timed(made.zero_)
        seconds.append(max(first_s - again_s, 1e-9))
        del made
    return 2 * FRESH_BYTES / statistics.median(seconds)


def timed(body: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start_s = time.perf_counter()
    body()
    return time.perf_counter() - start_s


def synchronize(device: torch.device) -> None:
    """Block until the device has computed all that was submitted."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matmul_rates(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> list[Rates]:
    """Return the rates of square products in each dtype. Their size doubles as long as a product takes below 0.2 s."""
    return [_matmul_rate(device, dtype) for dtype in dtypes]


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> Rates:
    rows = _LEAST_ROWS
    while True:
        # Products of ones need less power than those of a model, so that a GPU runs them at a higher clock.
        one, other = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
        _product_s(one, other)
        seconds = _product_s(one, other)
        if seconds * 8 > _MATMUL_S / 2 or rows >= _MOST_ROWS:
            break
        rows *= 2
    measured = [seconds]
    while sum(measured) < _MATMUL_S:
        measured.append(_product_s(one, other))
    rate = 2 * rows**3 / statistics.median(measured)
    return {"device": device.type, "dtype": str(dtype).removeprefix("torch."), "rows": rows, "flop_per_s": rate}


def _product_s(one: torch.Tensor, other: torch.Tensor) -> float:
    def product() -> None:
        torch.mm(one, other)
        synchronize(one.device)

    return timed(product)
