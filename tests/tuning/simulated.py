"""A search on a machine that is made up: the plan is wrong, and no run is like another."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from infinity.tuning import KNOBS, Choices, Outlook, Record, Run, Search, Setting

_RUN_S = 10.0


@dataclass(frozen=True)
class Found:
    """What came of it.

    Attributes:
        over_best: the step without noise, over that of the best of all settings; `over_given` over the given one's.
        measured: settings that were run at all; an exhaustive search runs all `settings`.
    """

    over_best: float
    over_given: float
    measured: int
    settings: int


def simulated_search(outlook: Outlook, choices: Choices, seed: int, *, noise: float, wrong: float = 0.2) -> Found:
    """Search where the plan is wrong by up to `wrong` for every value of every knob, and each run by up to `noise`."""
    errors, luck = random.Random(seed), random.Random(-seed - 1)
    factors = {
        (knob, value): errors.uniform(1 - wrong, 1 + wrong) for knob, values in choices.items() for value in values
    }

    def true_s(setting: Setting) -> float:
        return outlook.of(setting).step_s * math.prod(factors[knob, getattr(setting, knob)] for knob in KNOBS)

    def measure(setting: Setting, stop_above_s: float, within_s: float) -> Run:
        step_s = true_s(setting) * luck.uniform(1 - noise, 1 + noise)
        return Run(setting, (step_s,) * 2, took_s=_RUN_S, stopped=step_s > stop_above_s)

    record, clock = Record({}), itertools.count(step=_RUN_S)
    best = Search(outlook, choices, record, measure, 1e9, clock=lambda: float(next(clock))).run().best
    everything = [Setting(*values) for values in itertools.product(*(choices[knob] for knob in KNOBS))]
    possible = [setting for setting in everything if not outlook.of(setting).refused]
    least_s = min(map(true_s, possible))
    return Found(
        true_s(best) / least_s,
        true_s(best) / true_s(outlook.given),
        len({run.setting for run in record.runs}),
        len(possible),
    )
