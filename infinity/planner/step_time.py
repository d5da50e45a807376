"""How long a step takes: what every part of the machine has to do, and what of that runs at once.

[Note: lanes and windows]
A step is a forward window and a backward window, and updates that run within them. In a window the drives, the link,
the ranks' collectives and the compute device work at once, each through its own lane, so that it lasts as long as its
longest lane. Where the compute device is the CPU, the optimizer and the collectives are in its lane: they take its
cores. When updates run is the schedule's: `deferred` in the first forward pass, `backward` in the last backward pass
and, as far as gradients may wait in memory, in the first forward pass of the next step; `barrier`, and stages below 3
where `step()` shows the newest parameters, in a window of their own.

[Note: what lanes lose]
Of n units in a row, the first has to come before anything computes, and the last is stored after: a window lasts an
n-th of its shorter lanes longer than its longest. And a drive idles when all tiles in flight are with the optimizer:
the fewer there are, the more often (4 kept one busy for 88% of the time, 16 for 98%; see infinity/optim/pipeline.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import Config
from infinity.planner.rates import Duplex, Rates
from infinity.planner.traffic import Fetches
from infinity.planner.training_plan import TrainingPlan
from infinity.planner.work import Work
from infinity.tiers import Memory
from infinity.zero.updates import UpdateSchedule

_IDLE = 0.5  # of a drive, over the number of tiles in flight
_SPLITS = 20  # ways in which updates are tried to be divided between two windows

Lanes = dict[str, float]


@dataclass(frozen=True)
class Window:
    """A part of the step, with the seconds of its lanes, through which so many units go one after the other."""

    name: str
    lanes: Mapping[str, float]
    units: int = 1

    @property
    def seconds(self) -> float:
        """See [Note: what lanes lose]."""
        longest = max(self.lanes.values(), default=0.0)
        return longest + (sum(self.lanes.values()) - longest) / self.units

    @property
    def bound(self) -> str:
        """The lane that it waits for."""
        return max(self.lanes, key=self.lanes.__getitem__, default="nothing")


@dataclass(frozen=True)
class StepTime:
    """A predicted step.

    Attributes:
        parts: seconds of compute, link, disk, optimizer and collectives, each as if alone.
        windows: what runs after one another.
        unknown: parts whose rates are not known; the step takes longer by what they do.
        tokens: of all ranks.
        flops: of one rank's device.
        shared: the compute device's cores are the optimizer's, too.
        write_bytes: to the drives of one machine.
    """

    parts: Mapping[str, float]
    windows: tuple[Window, ...]
    unknown: tuple[str, ...]
    tokens: int
    flops: float
    shared: bool
    write_bytes: int

    @property
    def seconds(self) -> float:
        return sum(window.seconds for window in self.windows)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("inf")

    @property
    def flop_per_s(self) -> float:
        """Of one device, recomputation included."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """The share of the step in which the compute device computes the model."""
        return self.parts["compute"] / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The part that most of the step waits for."""
        bound: defaultdict[str, float] = defaultdict(float)
        for window in self.windows:
            bound[window.bound] += window.seconds
        return max(bound, key=bound.__getitem__, default="nothing")

    @property
    def break_even_tokens(self) -> float | None:
        """Tokens a step from which on computing hides the rest, if more of them cost nothing but computing."""
        if not self.parts["compute"]:
            return None
        fixed = max(self.parts["disk"], self.parts["link"])
        beside = self.parts["optimizer"] + self.parts["collectives"]
        fixed = fixed - beside if self.shared else max(fixed, self.parts["optimizer"], self.parts["collectives"])
        return max(0.0, fixed) * self.tokens / self.parts["compute"]

    def wear(self, rated_bytes: float) -> tuple[float, float]:
        """Bytes a day that are written, and days until as many are written as the drives are rated for."""
        day = self.write_bytes / self.seconds * 86400 if self.seconds else 0.0
        return day, rated_bytes / day if day else float("inf")


def predict_step(plan: TrainingPlan, config: Config, work: Work, rates: Rates) -> StepTime:
    """Predict a step of `plan` whose micro-batches are `work`, on machines of these rates."""
    seconds = _Seconds(plan, rates)
    micro = config.gradient_accumulation_steps
    traffic = plan.traffic
    compute_s = _compute(work, rates, micro)
    reduced = rates.reduce_bytes_per_s
    saved, stored = _activations(plan, config, work)
    forward = seconds.lanes(compute_s[0], traffic.forward, down=saved, written=stored)
    backward = seconds.lanes(
        compute_s[1],
        traffic.backward,
        up=saved + traffic.link_up,
        down=traffic.link_down,
        read=traffic.unspilled + stored,
        written=traffic.spilled,
        reduce_s=(traffic.reduced + traffic.averaged) / reduced if reduced else 0.0,
    )
    update = seconds.update()
    shared = not plan.machine.discrete
    passes = 1 if plan.sizing.layer_major else micro
    units = len(plan.units)
    windows = [_merge(window, shared, units) for window in _windows(plan, forward, backward, update, passes)]
    parts = _added(_added(forward, backward), update)
    return StepTime(
        {name: parts[name] for name in ("compute", "link", "disk", "optimizer", "collectives")},
        tuple(windows),
        seconds.unknown(),
        work.tokens * micro * plan.machine.ranks,
        (work.forward.total_flops + work.backward.total_flops) * micro,
        shared,
        plan.write_bytes * plan.machine.neighbours,
    )


def _activations(plan: TrainingPlan, config: Config, work: Work) -> tuple[int, int]:
    """What autograd saves in a step, as far as it leaves the device, and the host for the drives."""
    held = plan.sizing.rules.activations_bytes
    if not held:
        return 0, 0
    micro = config.gradient_accumulation_steps
    at_once = work.saved_bytes * (micro if plan.sizing.layer_major else 1)
    stored = max(0.0, at_once - held) * micro / (micro if plan.sizing.layer_major else 1)
    return int(work.saved_bytes * micro), int(stored) if config.tiering.activations == "nvme" else 0


def _compute(work: Work, rates: Rates, micro: int) -> tuple[float, float]:
    forward, backward = rates.compute_s(work.forward), rates.compute_s(work.backward)
    return micro * (forward or 0.0), micro * (backward or 0.0)


class _Seconds:
    """What bytes and parameters take on one machine, whose drives and cores its ranks share."""

    def __init__(self, plan: TrainingPlan, rates: Rates) -> None:
        self._plan = plan
        self._rates = rates
        self._neighbours = plan.machine.neighbours
        # A device whose memory has the states updates them in less time than a step's launches take.
        self._updated_below = sum(plan.sizing.shards.below)

    def lanes(
        self,
        compute_s: float,
        fetches: Fetches,
        *,
        up: int = 0,
        down: int = 0,
        read: int = 0,
        written: int = 0,
        reduce_s: float = 0.0,
    ) -> Lanes:
        """Of a window: `up` and `down` the link, `read` and `written` on the drives, beside what is fetched."""
        gather = self._rates.gather_bytes_per_s
        return {
            "compute": compute_s * (1 if self._plan.machine.discrete else self._neighbours),
            "disk": self._duplex(self._rates.disk, fetches.disk + read, written) * self._neighbours,
            "link": self._duplex(self._rates.link, fetches.link + up, down),
            "collectives": reduce_s + (fetches.gathered / gather if gather else 0.0),
        }

    def update(self) -> Lanes:
        traffic, rate = self._plan.traffic, self._rates.optimizer_params_per_s
        gather = self._rates.gather_bytes_per_s
        written = traffic.states + traffic.params_written
        return {
            "optimizer": self._updated_below * self._neighbours / rate if rate else 0.0,
            "disk": self._duplex(self._rates.disk, traffic.states, written) * self._neighbours / self._busy(),
            "collectives": traffic.regathered / gather if gather else 0.0,
        }

    def _busy(self) -> float:
        """The share of the time for which the optimizer's tiles keep the drives busy."""
        needs = self._plan.needs
        slots = self._plan.split.ring_bytes // needs.tile_bytes
        return 1 - _IDLE / slots if slots > 1 else 1.0

    @staticmethod
    def _duplex(rates: Duplex | None, inward: int, outward: int) -> float:
        return 0.0 if rates is None else rates.seconds(inward, outward)

    def unknown(self) -> tuple[str, ...]:
        """What has to be done at a rate that is not known."""
        plan, rates, traffic = self._plan, self._rates, self._plan.traffic
        needed = {
            "compute": not rates.products,
            "optimizer": rates.optimizer_params_per_s is None and self._updated_below > 0,
            "disk": rates.disk is None and plan.read_bytes + plan.write_bytes > 0,
            "link": rates.link is None and plan.machine.discrete,
            "collectives": (rates.gather_bytes_per_s is None or rates.reduce_bytes_per_s is None)
            and traffic.reduced + traffic.averaged > 0,
        }
        return tuple(name for name, missing in needed.items() if missing)


# Which runs under which #


def _windows(plan: TrainingPlan, forward: Lanes, backward: Lanes, update: Lanes, passes: int) -> list[Window]:
    """See [Note: lanes and windows]; of several passes only one has updates under it."""
    schedule, shared = UpdateSchedule(plan.update_schedule), not plan.machine.discrete
    if schedule is UpdateSchedule.BARRIER or plan.sizing.rules.settles:
        return [Window("forward", forward), Window("backward", backward), Window("update", update)]
    both = (("forward", forward), ("backward", backward)) if passes > 1 else ()
    others = [Window(f"other {name} passes", _scaled(lanes, (passes - 1) / passes)) for name, lanes in both]
    first, last = _scaled(forward, 1 / passes), _scaled(backward, 1 / passes)
    most = 1.0
    least = 1.0
    if schedule is UpdateSchedule.SPECULATIVE:
        least = 1.0 - _share_ahead(plan)
    if schedule is UpdateSchedule.BACKWARD:
        grads = sum(plan.sizing.shards.grad_sizes)
        least, most = 0.0, min(1.0, plan.split.grads_bytes / max(1, grads))
    choices = []
    for index in range(_SPLITS + 1):
        share = least + (most - least) * index / _SPLITS
        pair = [
            Window("forward with updates", _added(first, _scaled(update, share))),
            Window("backward with updates" if share < 1 else "backward", _added(last, _scaled(update, 1 - share))),
        ]
        choices.append(pair)
    best = min(choices, key=lambda pair: sum(_merge(window, shared, len(plan.units)).seconds for window in pair))
    return [*best, *others]


def _share_ahead(plan: TrainingPlan) -> float:
    """How much of the states can be updated before the norm is known: what has two slots, or room for before-images."""
    sizing, needs, split = plan.sizing, plan.needs, plan.split
    if sizing.keeps_steps:
        return 1.0
    share = split.images_bytes / needs.images_bytes if needs.images_bytes else 0.0
    if sizing.has_slots and sizing.rules.params is Memory.NVME:
        share += 1.0 - split.states_bytes / max(1, needs.states_bytes)
    return min(1.0, share)


def _merge(window: Window, shared: bool, units: int) -> Window:
    """Where cores are shared, what the optimizer and the collectives take of them is the compute lane's."""
    lanes = dict(window.lanes)
    if shared:
        lanes["compute"] = sum(lanes.pop(name, 0.0) for name in ("compute", "optimizer", "collectives"))
    return Window(window.name, lanes, units)


def _scaled(lanes: Lanes, factor: float) -> Lanes:
    return {name: seconds * factor for name, seconds in lanes.items()}


def _added(one: Lanes, other: Lanes) -> Lanes:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one.keys() | other.keys()}
