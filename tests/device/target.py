"""The device that the tests of this directory run on: the emulated one, or a real one.

`INFINITY_TEST_DEVICE=cuda` selects the CUDA device. Its matrix products have other bits than those of a CPU, so results
are compared with a training on the same device that overlaps nothing: `REFERENCE` and `PLAIN` say where and how. Tests
of the emulator itself, and those that need its counters or limits, are skipped there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.behaviour.reference import Placement
from tests.device import simdev

DEVICE = os.environ.get("INFINITY_TEST_DEVICE", "simdev")
EMULATED = DEVICE == "simdev"
_SPEED_SETTINGS = {"launch_us", "link_us", "h2d", "d2h"}

# What results are compared with: the CPU with everything in memory, or the real device without any overlap.
REFERENCE = "cpu" if EMULATED else DEVICE
PLAIN = Placement() if EMULATED else Placement("cpu", "cpu", schedule="barrier")

emulated_only = pytest.mark.skipif(not EMULATED, reason="needs the emulated device")


def problem() -> str | None:
    """Why there is no such device here; None if there is."""
    if EMULATED:
        return simdev.problem()
    if DEVICE != "cuda":
        return f"INFINITY_TEST_DEVICE is {DEVICE}: set it to cuda, or unset it for the emulated device"
    return None if torch.cuda.is_available() else "no CUDA device"


def prepare() -> None:
    """Make the device this process's accelerator; the same work has the same bits on it each time."""
    if EMULATED:
        simdev.load()
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # its kernels would hide missing waits


@contextmanager
def configured(**settings: float) -> Iterator[None]:
    """The emulated device with these settings.

    A real device has its own speed: speeds are ignored there, and any other setting skips the test.
    """
    if not EMULATED:
        if others := settings.keys() - _SPEED_SETTINGS:
            pytest.skip(f"only the emulated device can be given: {', '.join(sorted(others))}")
        yield
        return
    with simdev.configured(**settings):
        yield


def counts() -> dict[str, int]:
    """What the emulated device has counted; skips the test on a real one."""
    if not EMULATED:
        pytest.skip("only the emulated device counts this")
    return simdev.counts()


def allocated_bytes() -> int:
    """Memory of the device that tensors hold."""
    if not EMULATED:
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one a stream for later products
    return torch.accelerator.memory_allocated()
