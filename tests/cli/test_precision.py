"""Which precision is chosen does not depend on what else the machine does meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from infinity.cli.training.precision import faster_precision, least_seconds

PRODUCTS_S = (0.0006, 0.0006, 0.0009)  # of one layer, in fp32
MOST_S = 1.3  # a second, and the round that has begun


class Processor:
    """A clock that goes on while others compute.

    Args:
        others: processes that take turns with this one; each computes for some milliseconds.
    """

    def __init__(self, others: float, seed: int) -> None:
        self.now_s = 0.0
        self._others = others
        self._chance = random.Random(seed)
        self._left_s = self._slice_s()

    def _slice_s(self) -> float:
        return 0.003 * self._chance.uniform(0.5, 1.5)

    def clock(self) -> float:
        return self.now_s

    def compute(self, seconds: float) -> float:
        """Compute for so long, and return what the clock says that it took."""
        start_s = self.now_s
        while seconds > 0:
            done_s = min(seconds, self._left_s)
            seconds, self._left_s, self.now_s = seconds - done_s, self._left_s - done_s, self.now_s + done_s
            if self._left_s <= 0:
                self.now_s += self._others * self._slice_s()
                self._left_s = self._slice_s()
        return self.now_s - start_s

    def measure(self, bf16: float) -> tuple[dict[str, float], float]:
        """Seconds by precision, if bf16 takes so many times as long as fp32; and how long measuring took."""
        start_s = self.now_s
        runs: list[Callable[[], float]] = [
            partial(self.compute, product_s * factor) for product_s in PRODUCTS_S for factor in (1.0, bf16)
        ]
        found = least_seconds(runs, self.clock)
        return {"fp32": sum(found[::2]), "bf16": sum(found[1::2])}, self.now_s - start_s


@pytest.mark.parametrize("others", [0, 1, 5, 11])
@pytest.mark.parametrize(("bf16", "chosen"), [(0.25, "bf16"), (1.0, "bf16"), (3.0, "fp32")])
def test_the_precision_that_is_chosen_does_not_depend_on_the_load(bf16, chosen, others) -> None:
    for seed in range(50):
        seconds, took_s = Processor(others, seed).measure(bf16)
        assert faster_precision(seconds) == chosen, (seed, seconds)
        assert took_s < (MOST_S if others else 0.3), seed


def test_products_that_take_seconds_are_run_a_few_times() -> None:
    seconds, took_s = Processor(0, 0).measure(bf16=400.0)
    assert faster_precision(seconds) == "fp32"
    assert took_s < 4 * 401 * sum(PRODUCTS_S)
