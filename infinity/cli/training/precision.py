"""Which precision to train in, by measuring: a library that supports bf16 may compute it 30 times more slowly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from infinity.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ROWS, _WIDTH = 256, 512  # on one slow core a set of products takes 10 ms in float32
_RUNS, _LEAST_RUNS = 12, 3
_MOST_S = 1.0  # after which the least number of runs is enough: with plain loops in bf16 a run may take a second
# bf16 moves half the bytes of parameters and gradients, so that it may compute somewhat more slowly.
_MOST_SLOWDOWN = 1.5


def product_seconds(device: torch.device, precisions: tuple[str, ...]) -> dict[str, float]:
    """Seconds of the three matrix products of a linear layer (forward, and backward to input and weight), by precision.

    All three are timed, since a processor may have fast code for one operand order and none for another.
    """
    layers = {precision: _layer(device, _DTYPES[precision]) for precision in precisions}
    runs: list[dict[str, float]] = []
    stop_s = time.perf_counter() + _MOST_S
    while len(runs) < _LEAST_RUNS or (len(runs) < _RUNS and time.perf_counter() < stop_s):
        runs.append({precision: layer() for precision, layer in layers.items()})
    # The first run chooses kernels and reserves memory. Other processes can only slow a run down, hence the least.
    return {precision: min(run[precision] for run in runs[1:]) for precision in precisions}


def faster_precision(seconds: Mapping[str, float]) -> str:
    """`bf16`, unless fp32 computes so much faster that the larger parameters and gradients pay."""
    return "bf16" if seconds["bf16"] <= _MOST_SLOWDOWN * seconds["fp32"] else "fp32"


def measured_precision(device: torch.device) -> str:
    """What suits a device, as `faster_precision` chooses it.

    Raises:
        ConfigError: the device cannot be used.
    """
    try:
        return faster_precision(product_seconds(device, ("fp32", "bf16")))
    except (AssertionError, RuntimeError) as error:  # there is none, or torch cannot use it
        raise ConfigError(f"--device is {device}, which cannot be used: {error}") from error


def slowdown(device: torch.device, precision: str) -> float:
    """How many times longer the products of this precision take than those of fp32, if that is worth a change; or 1."""
    if precision == "fp32":
        return 1.0
    seconds = product_seconds(device, ("fp32", precision))
    ratio = seconds[precision] / seconds["fp32"]
    return ratio if ratio > _MOST_SLOWDOWN else 1.0


def _layer(device: torch.device, dtype: torch.dtype) -> Callable[[], float]:
    """What computes the products once, and returns the seconds that they took."""
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
