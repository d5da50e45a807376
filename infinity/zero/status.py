"""Sample what an engine does while it trains, for `infinity top` in another process."""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict
from typing import Any

from infinity.config import Config
from infinity.io import IoStats
from infinity.optim.optimizer import TieredOptimizer
from infinity.zero.build import Runtime
from infinity.zero.step import Step


class Sampler:
    """Reads an engine's status from another thread. It reads only plain numbers, each of which is valid at any time."""

    def __init__(self, step: Step, runtime: Runtime, optimizer: TieredOptimizer, config: Config) -> None:
        self._step = step
        self._runtime = runtime
        self._optimizer = optimizer
        self._samples = config.train_batch_size
        self._before: tuple[float, list[IoStats]] | None = None

    def __call__(self) -> dict[str, Any]:
        step, stats = self._step, self._step.last.stats
        step_s, waiting = self._runtime.counters.step_wall_s, self._runtime.counters.waiting
        now_s = time.perf_counter()
        told = step.last.told  # by the training loop, with `engine.tell`
        tokens = told.get("tokens")
        group = next(iter(self._optimizer.param_groups), {})
        return {
            "rank": self._runtime.ranks.rank,
            "ranks": self._runtime.ranks.size,
            "step": step.counter.counts.global_steps,
            "skipped_steps": step.counter.counts.skipped_steps,
            "phase": step.phase.value,
            "loss": _number(step.last.loss),
            "lr": _number(group.get("lr")),
            "grad_norm": _number(stats.grad_norm),
            "step_s": step_s,
            "samples_per_s": None if step_s is None else self._samples / step_s,
            "phase_s": dict(stats.phase_s),
            "stall_s": dict(stats.stall_s),
            "waiting": None if waiting is None else {"cause": waiting[0].value, "for_s": now_s - waiting[1]},
            "tiers": {name: asdict(level) for name, level in self._runtime.tiers().items()},
            **self._io(),
            "steps": told.get("steps"),
            "tokens_per_s": tokens / step_s if tokens and step_s else None,
        }

    def _io(self) -> dict[str, Any]:
        """Return what the drives have done since the last call."""
        drives = [
            ([os.fsencode(path).decode("utf-8", "backslashreplace") for path in paths], stats)
            for paths, stats in self._runtime.swap.io_stats()
        ]
        activations = self._step.activations
        for name, stats in (
            ("weights in place", self._runtime.files.io_stats()),
            ("activations", None if activations is None else activations.io_stats()),
        ):
            if stats is not None:
                drives.append(([name], stats))
        now_s, stats_now = time.perf_counter(), [stats for _, stats in drives]
        before = self._before
        self._before = now_s, stats_now
        rates: list[dict[str, Any]] = []
        if before is not None and len(before[1]) == len(stats_now):
            passed_s = now_s - before[0]
            rates = [
                {
                    "paths": paths,
                    "read_bytes_per_s": (stats.bytes_read - then.bytes_read) / passed_s,
                    "write_bytes_per_s": (stats.bytes_written - then.bytes_written) / passed_s,
                }
                for (paths, stats), then in zip(drives, before[1], strict=True)
            ]
        return {
            "drives": rates,
            "in_flight": {
                "read_bytes": sum(max(0, stats.reads_asked_bytes - stats.bytes_read) for stats in stats_now),
                "write_bytes": sum(max(0, stats.writes_asked_bytes - stats.bytes_written) for stats in stats_now),
            },
        }


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
