"""Predict the time of a step: simulate the work of every part of the machine as the engine would order it.

The plan gives the bytes that move, the work gives the computation, and the rates give the speed of each part of the
machine, alone and beside the others. They become seconds of units and tiles (`StepWork`), which `simulate_step` puts in
order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import Config
from infinity.planner.filled import filled_later, once_filled
from infinity.planner.lanes import Speeds
from infinity.planner.rates import Duplex, Rates
from infinity.planner.simulated_step import PARTS, simulate_step
from infinity.planner.step_work import StepWork, step_work
from infinity.planner.training_plan import TrainingPlan
from infinity.planner.work import Work

_DUPLEX = (("read", "write", "disk"), ("up", "down", "link"))
_ON_CORES = ("compute", "optimizer", "collectives")  # if the compute device is the CPU


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
        seconds: of a step in steady state.
        parts: seconds of compute, link, disk, optimizer and collectives, each as if alone.
        busy: seconds in which each part is busy; longer if parts slow each other down.
        phases: seconds of forward, backward, and time spent waiting for updates at the end of the step.
        waits: waits of the computation in these, by part.
        unknown: parts with unknown rates; their time is missing from the step.
        tokens: of all ranks.
        flops: of one rank's device.
        shared: the optimizer runs on the compute device's cores.
        write_bytes: to the drives of one machine.
        leased_grads_bytes: peak of gradients in memory that units share.
    """

    seconds: float
    parts: Mapping[str, float]
    busy: Mapping[str, float]
    phases: Mapping[str, float]
    waits: Mapping[str, float]
    unknown: tuple[str, ...]
    tokens: int
    flops: float
    shared: bool
    write_bytes: int
    leased_grads_bytes: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("inf")

    @property
    def flop_per_s(self) -> float:
        """Of one device, including recomputation."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """The share of the step in which the compute device would compute the model at full speed."""
        return self.parts["compute"] / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The part that is busy longest."""
        return max(self.busy, key=self.busy.__getitem__) if any(self.busy.values()) else "nothing"

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens a step from which computation hides everything else, if more tokens only add computation."""
        if not self.parts["compute"]:
            return None
        fixed = max(self.parts["disk"], self.parts["link"])
        beside = self.parts["optimizer"] + self.parts["collectives"]
        fixed = fixed - beside if self.shared else max(fixed, self.parts["optimizer"], self.parts["collectives"])
        return max(0.0, fixed) * self.tokens / self.parts["compute"]

    def wear(self, rated_bytes: float) -> tuple[float, float]:
        """Return the bytes written a day, and the days until the drives' rated number of bytes is written."""
        day = self.write_bytes / self.seconds * 86400 if self.seconds else 0.0
        return day, rated_bytes / day if day else float("inf")


def predict_step(plan: TrainingPlan, config: Config, work: Work, rates: Rates) -> StepTime:
    """Predict a step of `plan` with micro-batches of `work` on machines of these rates. Not the first step: the device
    is filled with optimizer states after it."""
    shared = not plan.machine.discrete
    speeds = speeds_of(rates, _most_rows(work), shared=shared)
    before, later = plan, filled_later(plan, config, work)
    plan = once_filled(before, config, later)
    asked = step_work(plan, config, work, rates)
    done = simulate_step(asked, speeds)
    # In the first step, no states on the device reduce the memory for gradients yet.
    first = simulate_step(step_work(before, config, work, rates), speeds) if later else done
    micro = config.gradient_accumulation_steps
    return StepTime(
        done.seconds,
        _parts(plan, asked, rates),
        done.busy_s,
        {name: seconds for name, seconds in done.phases_s.items() if seconds > 0},
        {part: seconds for part, seconds in done.waits_s.items() if seconds > 0},
        _unknown(plan, rates),
        work.tokens * micro * plan.machine.ranks,
        (work.forward.total_flops + work.backward.total_flops) * micro,
        shared,
        plan.traffic.write_bytes * plan.machine.neighbours,
        first.leased_bytes,
    )


def _parts(plan: TrainingPlan, asked: StepWork, rates: Rates) -> dict[str, float]:
    traffic, machine, passes = plan.traffic, plan.machine, asked.passes
    saved = [sum(getattr(use, name) for use in asked.uses) for name in ("up_s", "down_s", "read_s", "write_s")]
    up = traffic.link + traffic.link_up
    gathered = traffic.gathered / rates.gather_bytes_per_s if rates.gather_bytes_per_s else 0.0
    reduced = (traffic.reduced + traffic.averaged) / rates.reduce_bytes_per_s if rates.reduce_bytes_per_s else 0.0
    return {
        "compute": passes * sum(use.forward_s + use.backward_s for use in asked.uses),
        "link": _duplex(rates.link, up, traffic.link_down) + passes * sum(saved[:2]),
        "disk": _duplex(rates.disk, traffic.read_bytes, traffic.write_bytes) * machine.neighbours
        + passes * sum(saved[2:]),
        "optimizer": sum(tile.update_s for unit in asked.units for tile in unit.tiles),
        "collectives": gathered + reduced,
    }


def _duplex(rates: Duplex | None, inward: int, outward: int) -> float:
    return 0.0 if rates is None else rates.seconds(inward, outward)


def _unknown(plan: TrainingPlan, rates: Rates) -> tuple[str, ...]:
    """Return the parts of the machine that have work but no known rate."""
    traffic = plan.traffic
    needed = {
        "compute": not rates.products,
        "optimizer": rates.optimizer_params_per_s is None and sum(plan.sizing.shards.off_device) > 0,
        "disk": rates.disk is None and traffic.read_bytes + traffic.write_bytes > 0,
        "link": rates.link is None and plan.machine.discrete,
        "collectives": (rates.gather_bytes_per_s is None or rates.reduce_bytes_per_s is None)
        and traffic.reduced + traffic.averaged > 0,
    }
    return tuple(name for name, missing in needed.items() if missing)


def _most_rows(work: Work) -> int:
    """Return the number of rows that most of a micro-batch's products have."""
    flops: defaultdict[int, float] = defaultdict(float)
    for kind, amount in (*work.forward.flops.items(), *work.backward.flops.items()):
        flops[kind.rows] += amount if kind.layout != "attention" else 0.0
    return max(1, max(flops, key=flops.__getitem__, default=1))


def speeds_of(rates: Rates, rows: int, *, shared: bool) -> Speeds:
    """Return a function of the busy lanes that gives each lane's speed, as a share of its speed alone.

    Args:
        rows: of most products.
        shared: the optimizer and the collectives run on the compute device's cores.
    """

    def speeds(busy: frozenset[str]) -> dict[str, float]:
        parts = frozenset(PARTS[lane] for lane in busy)
        shares = {part: _beside(part, parts - {part}, rates, rows, shared=shared) for part in parts}
        found = {lane: shares[PARTS[lane]] for lane in busy}
        for inward, outward, part in _DUPLEX:
            duplex = rates.disk if part == "disk" else rates.link
            if duplex is not None and inward in busy and outward in busy:
                found[inward] *= min(1.0, duplex.both / 2 / duplex.inward)
                found[outward] *= min(1.0, duplex.both / 2 / duplex.outward)
        return found

    return speeds


def _beside(part: str, others: frozenset[str], rates: Rates, rows: int, *, shared: bool) -> float:
    """Return the measured share of its speed that a part keeps while others work.

    If it was not measured, parts on the same cores share them evenly, and other parts do not affect each other.
    """
    measured = frozenset(other for other in others if rates.left(part, frozenset({other}), rows) is not None)
    rivals = [other for other in others - measured if shared and part in _ON_CORES and other in _ON_CORES]
    return (rates.left(part, measured, rows) or 1.0) / (1 + len(rivals))
