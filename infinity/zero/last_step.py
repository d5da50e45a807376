"""Results and costs of the last step, for the user and for monitors."""

from __future__ import annotations

import logging
from typing import Any

from infinity.config import Config
from infinity.optim.optimizer import TieredOptimizer
from infinity.telemetry import Counters, StepStats
from infinity.telemetry.monitor import Event, Monitor, tier_costs, tier_peaks
from infinity.zero.losses import Losses
from infinity.zero.step_counter import Counts
from infinity.zero.updates import StepOutcome

_log = logging.getLogger(__name__)


class LastStep:
    """Results and costs of the last step.

    Attributes:
        outcome: gradient norm, and whether the step was skipped; None before the first step.
        stats: times, bytes moved and memory peaks of the step.
        loss: mean of this rank's losses, if a monitor reads it or it costs nothing to know.
        told: values that the training loop has reported, for monitors.
    """

    def __init__(
        self, config: Config, counters: Counters, monitor: Monitor, optimizer: TieredOptimizer, losses: Losses
    ) -> None:
        self.outcome: StepOutcome | None = None
        self.stats = StepStats()
        self.loss: float | None = None
        self.told: dict[str, Any] = {}
        self._config = config
        self._counters = counters
        self._monitor = monitor
        self._optimizer = optimizer
        self._losses = losses

    def continue_from(self, before: LastStep) -> None:
        """Copy the results of an earlier engine of the same training."""
        self.outcome, self.stats, self.loss, self.told = before.outcome, before.stats, before.loss, before.told

    def end_step(self, counts: Counts, peak_bytes: dict[str, int]) -> None:
        """Compute and report the costs of the step that has just ended. The caller has set `outcome`."""
        outcome = self.outcome
        assert outcome is not None
        self.stats = self._counters.end_step(peak_bytes, grad_norm=outcome.grad_norm, skipped=outcome.skipped)
        if outcome.skipped:
            loss_scale = self._losses.loss_scale
            scale = f"; the loss scale is {loss_scale.value:g} now" if loss_scale.dynamic else ""
            _log.warning("step %d is skipped: its gradients are not finite%s", counts.global_steps - 1, scale)
        self.loss = self._losses.take_sum()
        if self._monitor.writes:
            self._monitor.write_events(self._events(counts))

    def _events(self, counts: Counts) -> list[Event]:
        """Return the events for monitors.

        The loss is plotted at the sample count before the step, and all other values at the count after it.
        """
        config = self._config
        samples = counts.global_steps * config.train_batch_size
        told: dict[str, float] = {"Train/Samples/lr": float(self._optimizer.param_groups[0]["lr"])}
        if config.fp16 is not None:
            told["Train/Samples/loss_scale"] = self._losses.loss_scale.value
        if config.monitors.phases:
            names = {"update": "step"}
            for phase, seconds in self.stats.phase_s.items():
                told[f"Train/Samples/elapsed_time_ms_{names.get(phase, phase)}"] = 1e3 * seconds
        told |= tier_costs(self.stats) | tier_peaks(self.stats)
        events = [(name, value, samples) for name, value in told.items()]
        if self.loss is not None:
            events.insert(0, ("Train/Samples/train_loss", self.loss, samples - config.train_batch_size))
        return events
