"""Chooses the precision by measurement: on some processors, bf16 is supported but up to 30 times slower than fp32."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from infinity.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS, _WIDTH = 256, 512  # on one slow core a set of products takes 10 ms in float32
_RUNS, _LEAST_RUNS = 12, 3
_MOST_S = 1.0  # after this time, `_LEAST_RUNS` runs are enough: a run in slow bf16 may take a second
# bf16 is preferred up to this slowdown, because it moves half the bytes of parameters and gradients.
_MOST_SLOWDOWN = 1.5


def product_seconds(device: torch.device, precisions: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds of the three matrix products of a linear layer, by precision.

    They are forward, and backward to input and weight: a library may have fast code for one layout of the operands
    and none for another.
    """
    layers = {precision: _layer(device, _DTYPES[precision]) for precision in precisions}
    runs: list[dict[str, float]] = []
    stop_s = time.perf_counter() + _MOST_S
    while len(runs) < _LEAST_RUNS or (len(runs) < _RUNS and time.perf_counter() < stop_s):
        runs.append({precision: layer() for precision, layer in layers.items()})
    # The first run also chooses kernels and allocates memory. Other processes only add time, hence the minimum.
    return {precision: min(run[precision] for run in runs[1:]) for precision in precisions}


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


def slowdown(device: torch.device, precision: str) -> float:
    """Return how many times longer products take than in fp32; 1 if the ratio is too small to change the precision."""
    if precision == "fp32":
        return 1.0
    seconds = product_seconds(device, ("fp32", precision))
    ratio = seconds[precision] / seconds["fp32"]
    return ratio if ratio > _MOST_SLOWDOWN else 1.0


def _layer(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """Return a function that computes the products once, and returns the seconds that they took."""
    inputs = torch.randn(_ROWS, _WIDTH, device=device).to(dtype)
    weight = torch.randn(_WIDTH, _WIDTH, device=device).to(dtype)

    def seconds() -> float:
        start_s = time.perf_counter()
        outputs = inputs @ weight.T
        outputs @ weight
        outputs.T @ inputs
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start_s

    return seconds
