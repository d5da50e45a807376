"""The emulated device itself: what it computes, in which order, and what it notices."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.device import simdev
from tests.device.target import emulated_only

pytestmark = emulated_only

DEVICE = "simdev"  # as a string: torch knows no such device where a real one is tested
MIB = 1 << 20


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0)).to(dtype)


@contextmanager
def seen_races(count: int) -> Iterator[None]:
    """Inside, this many races are seen. They do not count for the test."""
    lib = simdev.load()
    before = simdev.counts()["races"]
    yield
    torch.accelerator.synchronize()
    assert simdev.counts()["races"] - before == count
    lib.simdev_forgive_races(count)


# Values #


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_has_the_bits_of_the_cpu(dtype) -> None:
    here = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1)).to(dtype)
    there = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1)).to(dtype)
    there.load_state_dict(here.state_dict())
    there.to(DEVICE)
    inputs = random(8, 64, dtype=dtype)
    expected = here(inputs).pow(2).sum()
    got = there(inputs.to(DEVICE)).pow(2).sum()
    expected.backward()
    got.backward()
    assert torch.equal(got.cpu(), expected)
    for left, right in zip(there.parameters(), here.parameters(), strict=True):
        assert torch.equal(left.grad.cpu(), right.grad)


def test_operators_without_a_shape_in_advance_run_at_once() -> None:
    values = random(100)
    before = simdev.counts()["run_at_once"]
    assert torch.equal(values.to(DEVICE).nonzero().cpu(), values.nonzero())
    assert simdev.counts()["run_at_once"] > before


def test_strides_views_and_foreach() -> None:
    values = random(6, 8)
    there = values.to(DEVICE)
    assert torch.equal(there.t()[2:, ::2].contiguous().cpu(), values.t()[2:, ::2])
    torch._foreach_mul_([there[0], there[1]], 3.0)
    assert torch.equal(there[:2].cpu(), values[:2] * 3)


def test_random_numbers_are_the_hosts() -> None:
    torch.manual_seed(3)
    expected = nn.functional.dropout(torch.ones(100), 0.5)
    torch.manual_seed(3)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device=DEVICE), 0.5).cpu(), expected)


def test_a_failing_kernel_is_an_error_of_what_comes_next() -> None:
    torch.zeros(4, device=DEVICE).index_select(0, torch.tensor([7]).to(DEVICE))
    with pytest.raises(RuntimeError, match="an earlier kernel failed"):
        torch.accelerator.synchronize()


# Order #


def test_kernels_run_behind_the_host() -> None:
    values = random(64, 64).to(DEVICE)
    torch.accelerator.synchronize()
    done = torch.Event(DEVICE)
    with simdev.configured(launch_us=20_000):
        for _ in range(5):
            values = values @ values
        done.record()
        assert not done.query()
        done.synchronize()
        assert done.query()


def test_a_stream_that_waits_for_an_event_sees_what_came_before_it() -> None:
    stream = torch.Stream(DEVICE)
    values = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with simdev.configured(launch_us=20_000):
        for _ in range(3):
            values += 1
        stream.wait_event(torch.accelerator.current_stream().record_event())
        with stream:
            waited = values.clone()
        stream.synchronize()
    assert torch.equal(waited.cpu(), torch.full((1000,), 4.0))


def test_a_stream_that_does_not_wait_sees_something_else() -> None:
    stream = torch.Stream(DEVICE)
    values = torch.ones(1000, device=DEVICE)
    torch.accelerator.synchronize()
    with simdev.configured(launch_us=20_000):
        for _ in range(10):
            values += 1
        with stream:
            early = values.clone()
        stream.synchronize()
        torch.accelerator.synchronize()
    assert not torch.equal(early.cpu(), values.cpu())


def test_events_measure_the_link() -> None:
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    source = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    with simdev.configured(h2d=10 * MIB):
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        assert 100 <= start.elapsed_time(end) < 2000


def test_the_engines_work_side_by_side() -> None:
    """A copy each way and a kernel, 0.2 s each, on three streams; a busy machine may need another try."""
    assert any(200 <= together_ms() < 400 for _ in range(5))


def together_ms() -> float:
    up, down = torch.Stream(DEVICE), torch.Stream(DEVICE)
    pinned = [torch.zeros(MIB, dtype=torch.uint8).pin_memory() for _ in range(2)]
    buffers = [torch.zeros(MIB, dtype=torch.uint8, device=DEVICE) for _ in range(3)]
    torch.accelerator.synchronize()
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    with simdev.configured(h2d=5 * MIB, d2h=5 * MIB, launch_us=200_000):
        start.record()
        with up:
            buffers[0].copy_(pinned[0], non_blocking=True)
        with down:
            pinned[1].copy_(buffers[1], non_blocking=True)
        buffers[2].add_(1)
        for stream in (up, down):
            torch.accelerator.current_stream().wait_stream(stream)
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


# Memory #


def test_a_host_that_touches_device_memory_dies() -> None:
    script = (
        "import ctypes, torch\n"
        "from tests.device import simdev\n"
        "simdev.load()\n"
        "ctypes.string_at(torch.zeros(4, device='simdev').data_ptr(), 4)\n"
    )
    root = Path(__file__).parents[2]
    died = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, timeout=120)
    assert died.returncode == -signal.SIGSEGV, died.stderr


def test_memory_that_is_new_or_was_freed_holds_nan() -> None:
    assert torch.empty(1000, device=DEVICE).isnan().all()
    values = torch.ones(1000, device=DEVICE)
    address = values.data_ptr()
    del values
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_memory_that_another_stream_uses_is_poisoned_under_it() -> None:
    for records in (True, False):
        stream = torch.Stream(DEVICE)
        values = torch.ones(1000, device=DEVICE)
        torch.accelerator.synchronize()
        with simdev.configured(launch_us=20_000):
            with stream:
                for _ in range(3):
                    result = values * 2
            if records:
                values.record_stream(stream)
            del values
            torch.accelerator.synchronize()
        assert result.isnan().any().item() is not records


def test_capacity_is_a_limit() -> None:
    torch.accelerator.synchronize()
    held = torch.accelerator.memory_allocated()
    with simdev.configured(capacity=held + 2 * MIB):
        kept = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match="simdev out of memory"):
            torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)
        assert torch.accelerator.get_memory_info() == (MIB, held + 2 * MIB)
        del kept
        torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)


# Races #


def test_changing_the_source_of_a_pending_copy_is_a_race() -> None:
    source = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    with simdev.configured(h2d=20 * MIB), seen_races(1):
        target.copy_(source, non_blocking=True)
        source[5] = 1


def test_waiting_before_the_source_is_changed_is_no_race() -> None:
    source = torch.zeros(MIB, dtype=torch.uint8).pin_memory()
    target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    with simdev.configured(h2d=20 * MIB), seen_races(0):
        target.copy_(source, non_blocking=True)
        torch.accelerator.current_stream().synchronize()
        source[5] = 1


def test_reading_the_target_of_a_pending_copy_gives_nan() -> None:
    source = torch.ones(MIB, device=DEVICE)
    target = torch.zeros(MIB).pin_memory()
    with simdev.configured(d2h=40 * MIB):
        target.copy_(source, non_blocking=True)
        assert target.isnan().all()
        torch.accelerator.synchronize()
    assert (target == 1).all()


def test_a_copy_from_pageable_memory_is_waited_for() -> None:
    source = torch.ones(MIB)
    with simdev.configured(h2d=40 * MIB):
        target = source.to(DEVICE, non_blocking=True)
        source.zero_()
    assert (target.cpu() == 1).all()


def test_giving_host_memory_back_under_a_copy_is_a_race() -> None:
    module = torch.get_device_module(DEVICE)
    source = torch.zeros(MIB, dtype=torch.uint8)
    target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert module.register_host(source.data_ptr(), source.nbytes) == 0
    with simdev.configured(h2d=20 * MIB), seen_races(1):
        target.copy_(source, non_blocking=True)
        module.unregister_host(source.data_ptr())


def test_a_copy_that_is_refused_uses_no_memory() -> None:
    module = torch.get_device_module(DEVICE)
    source = torch.zeros(MIB, dtype=torch.uint8)
    target = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert module.register_host(source.data_ptr(), source.nbytes) == 0
    with simdev.configured(launch_us=20_000), seen_races(0):
        torch.zeros(4, device=DEVICE).index_select(0, torch.tensor([7]).to(DEVICE))
        copies = (target.copy_(source, non_blocking=True) for _ in count())
        with pytest.raises(RuntimeError, match="an earlier kernel failed"):
            deque(copies, maxlen=0)
        torch.accelerator.synchronize()
        module.unregister_host(source.data_ptr())


# Hollow kernels #


def test_hollow_kernels_take_their_time_and_compute_small_results_only() -> None:
    left = torch.ones(256, 256, device=DEVICE)
    before = simdev.busy()["compute"]
    with simdev.configured(hollow=1, flops=2 * 256**3 / 0.1):
        left @ left
        small = left[0, :4] + 1
        torch.accelerator.synchronize()
    assert 0.1 <= simdev.busy()["compute"] - before < 0.2
    assert small.cpu().tolist() == [2.0] * 4


def test_a_trace_names_what_ran(tmp_path) -> None:
    with simdev.configured(trace=1):
        torch.ones(4, device=DEVICE) * 2
        torch.accelerator.synchronize()
    simdev.write_trace(tmp_path / "trace.json")
    assert "aten::mul" in (tmp_path / "trace.json").read_text()
