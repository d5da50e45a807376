"""Predictions of settings by the planner: seconds of a step, bytes of each memory, or why a setting cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from infinity.config import Config, edited, format_size, load_config
from infinity.errors import InfinityError
from infinity.optim.formats import FORMATS
from infinity.planner import (
    Estimate,
    Machine,
    Point,
    Rates,
    Sweep,
    TrainingPlan,
    Work,
    count_work,
    drives_here,
    estimate,
    free_on,
    plan_training,
    predict_step,
    problems,
    rates_of,
)
from infinity.tuning.machine import drives_of
from infinity.tuning.space import KNOBS, Choices, Limits, Setting, canonical, keys_of, setting_of
from infinity.zero.sizing import compute_dtype

SPARE_SHARE = 0.05  # of a drive's free space, which swap files must leave free
_BETTER = 0.995  # a setting is faster if its predicted step takes less than this share of the other's


@dataclass(frozen=True)
class Prediction:
    """The prediction of a setting.

    Attributes:
        step_s: seconds of a step; infinite if the setting cannot run.
        refused: why it cannot run; empty if it can.
        parts: seconds of compute, link, disk, optimizer and collectives, each as if alone.
        nvme_bytes: size of its swap files.
        moved_bytes: bytes read from and written to the drives in a step.
    """

    step_s: float
    refused: str = ""
    parts: Mapping[str, float] | None = None
    nvme_bytes: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True)
class Bounds:
    """The memory that a setting may use. `libraries_bytes` is the memory of a process before it trains."""

    limits: Limits
    host_bytes: int
    libraries_bytes: int


class Outlook:
    """Predicts settings of one model and one configuration file.

    Args:
        values: the file's content.
        machine: the result of `measure_machine`.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Mapping[str, Any],
        machine: Mapping[str, Any],
        bounds: Bounds,
        seq_len: int,
        *,
        checkpointing: bool = False,
    ) -> None:
        self._model = model
        self._values = values
        self._bounds = bounds
        self._seq_len = seq_len
        self._checkpointing = checkpointing
        self.config = load_config(values)
        drive_bytes = free_on(drives_here(self.config))
        self._machine = Machine(device_bytes=machine["device_bytes"], drive_bytes=drive_bytes)
        self.given = setting_of(self.config, bounds.limits)
        dtype = str(compute_dtype(self.config)).removeprefix("torch.")
        device = machine["device"] or "cpu"
        self._rates = {
            name: rates_of(machine["profile"], dtype=dtype, state_format=name, device=device) for name in FORMATS
        }
        disk = self._rates["split"].disk
        self._drives = {} if disk is None else drives_of(disk, dict(machine), self.given.aio)
        self._works: dict[int, Work] = {}
        self._known: dict[Setting, Prediction] = {}

    @property
    def values(self) -> dict[str, Any]:
        """The content of the given file."""
        return dict(self._values)

    def values_of(self, setting: Setting) -> dict[str, Any]:
        """Return the content of the file with this setting."""
        return edited(self._values, keys_of(self.config, setting))

    def of(self, setting: Setting) -> Prediction:
        """Return the prediction of a setting, from a cache if it is known."""
        if setting not in self._known:
            try:
                self._known[setting] = self._predict(setting)
            except InfinityError as error:
                self._known[setting] = Prediction(float("inf"), str(error))
        return self._known[setting]

    def no_room(self, setting: Setting) -> str:
        """Return why the swap files do not fit on the drives or below the limit at present; empty if they do."""
        needed, limit = self.of(setting).nvme_bytes, self._bounds.limits.disk_bytes
        free = int(free_on(drives_here(load_config(self.values_of(setting)))) * (1 - SPARE_SHARE))
        if limit is not None and needed > limit:
            return f"its swap files take {format_size(needed)}, more than --max-disk {format_size(limit)}"
        if needed > free:
            return f"its swap files take {format_size(needed)}, and the drives have {format_size(free)} to spare"
        return ""

    def _predict(self, setting: Setting) -> Prediction:
        config = load_config(self.values_of(setting))
        plan = plan_training(self._model, config, self._machine)
        work = self._work(plan, config)
        step = predict_step(plan, config, work, self._rates_of(setting))
        needs = estimate(plan, work, self._bounds.libraries_bytes, step)
        return Prediction(
            step_s=step.seconds,
            refused="; ".join(self._problems(plan, needs, config)),
            parts=dict(step.parts),
            nvme_bytes=plan.nvme_bytes,
            moved_bytes=plan.traffic.read_bytes + plan.traffic.write_bytes,
        )

    def _problems(self, plan: TrainingPlan, needs: Estimate, config: Config) -> Iterator[str]:
        bounds, limits = self._bounds, self._bounds.limits
        yield from problems(plan, needs, drives_here(config), bounds.host_bytes)
        if limits.disk_bytes is not None and plan.nvme_bytes > limits.disk_bytes:
            yield (
                f"swap files of {format_size(plan.nvme_bytes)} are more than --max-disk "
                f"{format_size(limits.disk_bytes)}"
            )

    def _work(self, plan: TrainingPlan, config: Config) -> Work:
        key = config.micro_batch_size
        if key not in self._works:
            self._works[key] = count_work(self._model, plan, key, self._seq_len, checkpointing=self._checkpointing)
        return self._works[key]

    def _rates_of(self, setting: Setting) -> Rates:
        rates = self._rates[setting.state_format]
        return replace(rates, disk=self._drives.get(setting.aio, rates.disk))

    def over_budgets(self, setting: Setting) -> list[Point]:
        """Return predictions of the setting with other budgets of host memory; empty if the budget has no effect."""
        config = load_config(self.values_of(setting))
        needs = plan_training(self._model, config, self._machine).needs
        if not 0 < needs.least_bytes < needs.most_bytes:
            return []
        rates = self._rates_of(setting)
        sweep = Sweep(self._model, config, self._machine, rates, self._seq_len, self._checkpointing)
        return sweep.over("host-memory")

    # Candidates #

    def best(self, choices: Choices) -> Setting:
        """Return the setting predicted to be fastest: improve each placement knob by knob until nothing changes."""
        starts = [replace(self.given, placement=placement) for placement in choices["placement"]]
        found = [self._descend(start, choices) for start in starts]
        return min(found, key=lambda setting: (bool(self.of(setting).refused), self.of(setting).step_s))

    def _descend(self, setting: Setting, choices: Choices) -> Setting:
        for _ in KNOBS:
            before = setting
            for knob in KNOBS:
                setting = self._best_of(setting, knob, choices)
            if setting == before:
                break
        return setting

    def _best_of(self, setting: Setting, knob: str, choices: Choices) -> Setting:
        """Return the setting with the fastest value of one knob. Keep the present value unless another is faster."""
        best = setting
        for value in choices[knob]:
            other = canonical(replace(setting, **{knob: value}), self.given)
            runs, ran = not self.of(other).refused, not self.of(best).refused
            if runs and (not ran or self.of(other).step_s < _BETTER * self.of(best).step_s):
                best = other
        return best

    def neighbours(self, setting: Setting, choices: Choices) -> list[Setting]:
        """Return the settings that differ by one knob and can run, by predicted speed, the fastest first."""
        found = dict.fromkeys(
            canonical(replace(setting, **{knob: value}), self.given) for knob in KNOBS for value in choices[knob]
        )
        found.pop(setting, None)
        runs = [other for other in found if not self.of(other).refused and not self._alike(setting, other)]
        return sorted(runs, key=lambda other: self.of(other).step_s)

    def _alike(self, one: Setting, other: Setting) -> bool:
        """Whether the settings differ in aio only, and no bytes are moved from or to the drives."""
        return replace(one, aio=other.aio) == other and not self.of(one).moved_bytes
