"""Add the engine's transfers and waits to the logs of transformers' Trainer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from transformers import TrainerCallback

from infinity.engine import Engine
from infinity.telemetry.monitor import tier_costs, tier_peaks
from infinity.zero.param_access import owner_of


def report_tiers(trainer: Any) -> None:
    """Add the engine's transfers and waits to the logs of a Trainer, and so to everything that it reports to.

    The values are means of the steps since the last log: gigabytes by route (`tiers/nvme_read_gb`), seconds of waiting
    by cause (`tiers/disk_read_wait_s`); and the peak of each memory in gigabytes (`tiers/peak_host_gb`). If the Trainer
    trains without infinity, nothing is added.
    """
    # Before the callbacks that report, because they get the same dictionary.
    trainer.callback_handler.callbacks.insert(0, TierReport())


class TierReport(TrainerCallback):
    """Adds values to the logs, see `report_tiers`."""

    def __init__(self) -> None:
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = {}
        self._steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        found = next((owner_of(param) for param in model.parameters()), None)
        if found is None:
            return
        engine = found[0]
        assert isinstance(engine, Engine)
        stats = engine.stats()
        self._steps += 1
        for name, cost in tier_costs(stats).items():
            self._totals[name] += cost
        self._peaks = tier_peaks(stats)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not self._steps or logs is None:
            return
        means = {name: total / self._steps for name, total in self._totals.items()}
        logs.update(means | self._peaks)
        if state.log_history:
            state.log_history[-1].update(means | self._peaks)
        self._totals.clear()
        self._steps = 0
