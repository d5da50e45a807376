"""Chooses the precision by measurement: on some processors, bf16 is supported but up to 30 times slower than fp32."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from infinity.config import Precision
from infinity.errors import ConfigError
from infinity.kernels import torch_threads
from infinity.zero.sizing import DTYPES

_ROWS, _WIDTH = 64, 512  # a product takes up to 1 ms in float32: some runs fit between two interruptions
_ROUNDS, _LEAST_ROUNDS = 12, 3
_MOST_S = 1.0  # after this time, `_LEAST_ROUNDS` are enough: a round in slow bf16 may take a second
_STEADY = 1.25  # on an idle machine, the median run of a product takes at most this many times its fastest
# bf16 is preferred up to this slowdown, because it moves half the bytes of parameters and gradients.
_MOST_SLOWDOWN = 1.5


def product_seconds(device: torch.device, precisions: tuple[Precision, ...]) -> dict[str, float]:
    """Return the seconds of the three matrix products of a linear layer, by precision.

    They are forward, and backward to input and weight: a library may have fast code for one layout of the operands
    and none for another.
    """
    with torch_threads(1):  # on a busy machine, the threads of a product would wait for each other
        layers = {precision: _layer(device, DTYPES[precision]) for precision in precisions}
        by_product = [product for products in zip(*layers.values(), strict=True) for product in products]
        seconds = least_seconds(by_product)
    return {precision: sum(seconds[index :: len(layers)]) for index, precision in enumerate(layers)}


def least_seconds(runs: Sequence[Callable[[], float]], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Call each of `runs`, which return the seconds that they took, in several rounds. Return the minimum of each.

    Other processes can only make a run longer. On a busy machine there are more rounds, until one second has passed.
    """
    found: list[list[float]] = [[] for _ in runs]
    order = list(range(len(runs)))
    stop_s = clock() + _MOST_S
    while len(found[0]) < _LEAST_ROUNDS or (clock() < stop_s and not _are_enough(found)):
        for index in order:
            found[index].append(runs[index]())
        order.reverse()  # the longer a process has computed, the more likely it is interrupted
    return [min(each) for each in found]


def _are_enough(found: Sequence[Sequence[float]]) -> bool:
    """Whether the runs show no sign of other processes."""
    return len(found[0]) >= _ROUNDS and all(statistics.median(each) <= _STEADY * min(each) for each in found)


def faster_precision(seconds: Mapping[str, float]) -> str:
    """Return `bf16`, unless fp32 is so much faster that its larger parameters and gradients are worth it."""
    return "bf16" if seconds["bf16"] <= _MOST_SLOWDOWN * seconds["fp32"] else "fp32"


def measured_precision(device: torch.device) -> str:
    """Measure a device, and return the precision that `faster_precision` chooses.

    Raises:
        ConfigError: the device cannot be used.
    """
    try:
        return faster_precision(product_seconds(device, ("fp32", "bf16")))
    except (AssertionError, RuntimeError) as error:  # the device does not exist, or torch cannot use it
        raise ConfigError(f"--device is {device}, which cannot be used: {error}") from error


def slowdown(device: torch.device, precision: Precision) -> float:
    """Return how many times longer products take than in fp32; 1 if the ratio is too small to change the precision."""
    if precision == "fp32":
        return 1.0
    seconds = product_seconds(device, ("fp32", precision))
    ratio = seconds[precision] / seconds["fp32"]
    return ratio if ratio > _MOST_SLOWDOWN else 1.0


def _layer(device: torch.device, dtype: torch.dtype) -> list[Callable[[], float]]:
    """Return a function for each product, which computes it once and returns the seconds that this took."""
    inputs = torch.randn(_ROWS, _WIDTH, device=device).to(dtype)
    weight = torch.randn(_WIDTH, _WIDTH, device=device).to(dtype)
    outputs = inputs @ weight.T

    def timed(left: torch.Tensor, right: torch.Tensor) -> float:
        start_s = time.perf_counter()
        left @ right
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start_s

    return [partial(timed, *factors) for factors in ((inputs, weight.T), (outputs, weight), (outputs.T, inputs))]
