"""What measuring gradients takes of memory does not depend on how large their unit is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import infinity
from infinity.kernels import GradStats, grad_stats, grad_store, on_device
from infinity.tiers import Norms, SameMemory
from tests.behaviour.reference import Placement, Recipe

PIECE = 1 << 16  # of a norm that the device measures, in elements
SIZES = (1 << 18, 1 << 21)
FEW_BYTES = 16 << 10  # scalars


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that torch has allocated at once meanwhile, temporaries of its operators included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_the_recorder_sees_temporaries() -> None:
    values = torch.randn(SIZES[0])
    assert peak_bytes(values.double) == 8 * SIZES[0]
    assert peak_bytes(lambda: (values + 1) * 2) >= 8 * SIZES[0]
    assert peak_bytes(lambda: values.add_(1)) < FEW_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_the_device_takes_a_piece(dtype, monkeypatch) -> None:
    monkeypatch.setattr(on_device, "_PIECE", PIECE)
    norms = Norms(1, SameMemory())
    for size in SIZES:
        gradients = torch.randn(size).to(dtype)
        assert peak_bytes(lambda gradients=gradients: norms.bring(0, gradients)) <= 8 * PIECE + FEW_BYTES
        assert norms.bring(0, gradients).norm.item() == pytest.approx(gradients.double().norm().item())
    norms.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*SIZES, SIZES[0] + 5])
def test_a_norm_of_the_host_takes_a_piece(size, dtype) -> None:
    gradients = torch.randn(size).to(dtype)
    buffer, before, stats = torch.empty(size, dtype=dtype), gradients.clone(), list[GradStats]()
    assert peak_bytes(lambda: stats.append(grad_store(buffer, gradients, accumulate=False))) == 0
    assert peak_bytes(lambda: stats.append(grad_stats(gradients))) <= 4 * PIECE
    assert stats[0] == stats[1], "the same bits"
    assert torch.equal(gradients, before)
    gradients[7] = torch.nan
    assert not grad_stats(gradients).finite


def test_measuring_a_unit_anew_takes_a_piece(tmp_path) -> None:
    peaks = []
    for width in (256, 1024):
        model = nn.Sequential(nn.Linear(width, width))
        placement = Placement("nvme", "nvme", tmp_path)
        with infinity.initialize(model=model, config=Recipe("bf16", 1, 1.0).config(placement), device="cpu")[
            0
        ] as engine:
            engine.backward(engine(torch.randn(2, width, dtype=torch.bfloat16)).float().square().mean())
            gradients, (unit,) = engine._step.gradients, engine._runtime.executor.units
            peaks.append(
                peak_bytes(lambda gradients=gradients, unit=unit: (gradients.remeasure(unit), gradients.norm()))
            )
            engine.step()
    assert max(peaks) <= 4 * PIECE + FEW_BYTES
