"""Clocks under the names of `deepspeed.utils.timer`, and named ranges under those of `deepspeed.utils.nvtx`."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import infinity
from infinity.integrations.deepspeed import timers
from infinity.integrations.deepspeed.engine import initialize
from infinity.integrations.deepspeed.timers import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer, trim_mean
from tests.api.small_models import CONFIG, WIDTH, Heads


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timers, "time", made)
    return made


def test_a_clock_adds_up_its_times(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    group = SynchronizedWallClockTimer()
    for took_s in (1, 3):
        group("forward").start()
        clock.now_s += took_s
        group("forward").stop()
    assert group("forward").elapsed(reset=False) == 4000
    assert group.get_mean(["forward", "other"], reset=False) == {"forward": 2000}
    with caplog.at_level("INFO", logger="deepspeed"):
        group.log(["forward", "other"], normalizer=2)
    assert "time (ms) | forward: 2000.00" in caplog.text
    assert group("forward").elapsed() == 0
    with pytest.raises(AssertionError, match="not started"):
        group("forward").stop()
    group("forward").start()
    with pytest.raises(AssertionError, match="already been started"):
        group("forward").start()
    clock.now_s += 2
    assert group("forward").elapsed() == 2000
    assert group("forward").started_
    NoopTimer()("forward").start()
    assert NoopTimer()("forward").elapsed() == 0


def test_throughput_leaves_out_its_first_steps(clock: Clock) -> None:
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=False)
    timer = ThroughputTimer(config, 8, start_step=1, steps_per_output=3, logging_fn=lines.append)
    timer.stop()
    assert not timer.initialized
    assert timer.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        timer.start()
        clock.now_s += 2
        timer.stop(global_step=True)
    assert (timer.global_step_count, timer.total_elapsed_time, timer.avg_samples_per_sec()) == (3, 4, 4)
    assert len(lines) == 1
    assert "RunningAvgSamplesPerSec=4.0" in lines[0]


@pytest.mark.parametrize(
    ("given", "words"), [(0, "must be greater than 0"), (1.5, "must be a positive integer or None")]
)
def test_lines_come_after_whole_steps(given, words) -> None:
    with pytest.raises(ValueError, match=f"steps_per_output {words}"):
        ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), 1, steps_per_output=given)


def test_a_mean_may_leave_out_both_ends() -> None:
    assert trim_mean([100.0, 1.0, 2.0, 3.0, -50.0], 0.2) == 2
    assert trim_mean([], 0.1) == 0
    with pytest.raises(infinity.ConfigError, match="trim_percent"):
        trim_mean([1.0], 0.7)


@pytest.mark.usefixtures("ends_process_group")
def test_an_engine_counts_micro_batches_and_steps() -> None:
    engine: Any = initialize(model=Heads(), config=CONFIG | {"gradient_accumulation_steps": 2})[0]
    with engine:
        for _ in range(4):
            engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
            engine.step()
        assert (engine.tput_timer.micro_step_count, engine.tput_timer.global_step_count) == (4, 2)
        assert engine.tput_timer.batch_size == 8
        assert not engine.timers.get_timers()


def test_a_function_with_a_range_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = importlib.import_module("infinity.utils.nvtx")
    calls: list[Any] = []
    domains = SimpleNamespace(
        supports_nvtx_domain=True,
        range_push=lambda name, **more: calls.append((name, more)),
        range_pop=lambda **more: calls.append(more),
    )

    @nvtx.instrument_w_nvtx
    def scaled(value: int, by: int = 2) -> int:
        """Its words."""
        return value * by

    assert scaled(3) == 6
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Its words.")
    assert list(inspect.signature(scaled).parameters) == ["value", "by"]
    monkeypatch.setattr(nvtx, "get_accelerator", lambda: domains)
    assert scaled(4) == 8
    assert calls == [(scaled.__qualname__, {"domain": "DeepSpeed"}), {"domain": "DeepSpeed"}]
