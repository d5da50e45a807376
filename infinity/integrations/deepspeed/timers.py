"""`deepspeed.utils.timer`: clocks for a script's own measurements, in host time.

A device computes asynchronously; a synchronized clock waits for it. `engine.stats()` has the measurements of infinity.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from infinity.errors import ConfigError
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.logs import log_dist, logger, memory_line

_TRIMMED = 0.1  # the share of the longest, and of the shortest times that a mean omits


class SynchronizedWallClockTimer:
    """Clocks by name, each created at its first use: `timers("forward").start()`.

    Every start and stop waits for the device, if there is one.
    """

    class Timer:
        """One clock, which may run many times."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self._began_s = 0.0
            self._times_s: list[float] = []

        def start(self) -> None:
            """Start the clock. Raise AssertionError if it is running."""
            if self.started_:
                raise AssertionError(f"{self.name_} timer has already been started: stop() it first")
            get_accelerator().synchronize()
            self._began_s, self.started_ = time.perf_counter(), True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Add the time since `start`; with `reset`, drop the earlier times. `record` has no effect."""
            if not self.started_:
                raise AssertionError(f"{self.name_} timer is not started: start() it first")
            get_accelerator().synchronize()
            took_s = time.perf_counter() - self._began_s
            self._times_s = [took_s] if reset else [*self._times_s, took_s]
            self.started_ = False

        def reset(self) -> None:
            """Stop the clock, and drop all times."""
            self.started_ = False
            self._times_s = []

        def elapsed(self, reset: bool = True) -> float:
            """Return the sum of all times in milliseconds. A running clock continues to run."""
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
            """Return the mean time in milliseconds, without the longest and the shortest tenth."""
            return trim_mean([took_s * 1e3 for took_s in self._times_s], _TRIMMED)

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def get_timers(self) -> Mapping[str, Timer]:
        """Return all clocks by name."""
        return self.timers

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, self.Timer(name))

    @staticmethod
    def memory_usage() -> str:
        """Return the memory of the process, and of torch on its device, in words."""
        return memory_line()

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of the named clocks that exist, divided by `normalizer`."""
        there = [(name, self.timers[name].elapsed(reset) / normalizer) for name in names if name in self.timers]
        parts = [f"{name}: {took_ms:.2f}" for name, took_ms in there] + [memory_line()] * memory_breakdown
        log_dist(" | ".join(["time (ms)", *parts]), ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean time of each named clock in milliseconds, divided by `normalizer`."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


class NoopTimer:
    """Has the interface of `SynchronizedWallClockTimer`, and measures nothing."""

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
        start_step: number of first steps that are not measured.
        steps_per_output: number of steps between two lines in the log; None for no lines.
        logging_fn: called with each line.

    Raises:
        ConfigError: `steps_per_output` is no positive integer. ConfigError is a ValueError.
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
        """Count the beginning of an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start the time of a micro-batch."""
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End the time of a micro-batch; with `global_step`, also the step."""
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
        """Return the samples per second of the measured steps; minus infinity if there are none."""
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
    """Return the mean without the given share of the largest and of the smallest values; 0 for no values."""
    if not 0.0 <= trim_percent <= 0.5:
        raise ConfigError(f"trim_mean: trim_percent is {trim_percent}; it is a share between 0 and 0.5")
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return sum(kept) / len(kept) if kept else 0.0
