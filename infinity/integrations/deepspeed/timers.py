"""`deepspeed.utils.timer`: clocks for scripts that measure their own parts, in host time.

A device computes behind the host; a clock that is asked to waits for it. `engine.stats()` has what infinity measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.logs import log_dist, logger, memory_line

_TRIMMED = 0.1  # of the longest and of the shortest times, which a mean leaves out


class SynchronizedWallClockTimer:
    """Clocks by name, each made as it is first asked for: `timers("forward").start()`.

    Where a model computes on a device, its work is waited for at every start and stop.
    """

    class Timer:
        """One clock, which may run many times."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._began_s = 0.0
            self._times_s: list[float] = []

        def start(self) -> None:
            """Let it run; an AssertionError if it runs already."""
            if self.started_:
                raise AssertionError(f"{self.name_} timer has already been started: stop() it first")
            get_accelerator().synchronize()
            self._began_s, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Keep the time since `start`; alone, if `reset`. All are kept, so `record` changes nothing."""
            if not self.started_:
                raise AssertionError(f"{self.name_} timer is not started: start() it first")
            get_accelerator().synchronize()
            took_s = time.perf_counter() - self._began_s
            self._times_s = [took_s] if reset else [*self._times_s, took_s]
            self.started_ = False

        def reset(self) -> None:
            """Forget all times."""
            self.started_ = False
            self._times_s = []

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds of all times; a clock that runs goes on running."""
            runs = self.started_
            if runs:
                self.stop()
            total_ms = sum(self._times_s) * 1e3
            if reset:
                self.reset()
            if runs:
                self.start()
            return total_ms

        def mean(self) -> float:
            """Milliseconds of one time, without the longest and the shortest tenth."""
            return trim_mean([took_s * 1e3 for took_s in self._times_s], _TRIMMED)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> Mapping[str, Timer]:
        """All of them by name."""
        return self.timers

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """What the process, and torch on its device, hold now, in words."""
        return memory_line()

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log milliseconds, divided by `normalizer`, of those that there are."""
        there = [(name, self.timers[name].elapsed(reset) / normalizer) for name in names if name in self.timers]
        parts = [f"{name}: {took_ms:.2f}" for name, took_ms in there] + [memory_line()] * memory_breakdown
        log_dist(" | ".join(["time (ms)", *parts]), ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Mean milliseconds of one time of each of them, divided by `normalizer`."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


class NoopTimer:
    """The same, measuring nothing."""

    class Timer:
        def start(self) -> None: ...

        def stop(self, **how: Any) -> None: ...

        def reset(self) -> None: ...

        def elapsed(self, **how: Any) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    def get_timers(self) -> Mapping[str, Timer]:
        return {}

    def log(self, names: Iterable[str], **how: Any) -> None: ...

    def get_mean(self, names: Iterable[str], **how: Any) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples per second: `start()` before a micro-batch, `stop(global_step=...)` after it.

    Args:
        config: has `enabled`, and `synchronized` to wait for the device at each call.
        batch_size: samples of a step over all ranks.
        start_step: steps that are not measured.
        steps_per_output: a line is logged so often; None for never.
        logging_fn: takes that line.

    Raises:
        ConfigError: `steps_per_output` is no positive integer. It is a ValueError.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        if steps_per_output is not None:
            if isinstance(steps_per_output, bool) or not isinstance(steps_per_output, int):
                raise ConfigError(f"steps_per_output must be a positive integer or None, not {steps_per_output!r}")
            if steps_per_output <= 0:
                raise ConfigError(f"steps_per_output must be greater than 0, not {steps_per_output}")
        self.config = config
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or logger.info
        self.initialized = self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.start_time = self.end_time = 0.0
        self.total_elapsed_time = self.step_elapsed_time = 0.0

    def update_epoch_count(self) -> None:
        """Another epoch has begun."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """It is over, and with it the step if `global_step`."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        took_s = self.end_time - self.start_time
        self.total_elapsed_time += took_s
        self.step_elapsed_time += took_s
        if global_step:
            if report_speed and self._is_report_boundary():
                self.logging(self._line())
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Over the steps that were measured; minus infinity before there are any."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.time()

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _line(self) -> str:
        now = self.batch_size / max(self.step_elapsed_time, 1e-6)
        line = (
            f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}, "
            f"RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}"
        )
        return f"{line}, {memory_line()}" if self.monitor_memory else line


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without that share of the largest and of the smallest; 0 of nothing."""
    if not 0.0 <= trim_percent <= 0.5:
        raise ConfigError(f"trim_mean: trim_percent is {trim_percent}; it is a share between 0 and 0.5")
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0
