"""A short run of the soak."""

from __future__ import annotations

from benchmarks import soak_device
from tests.device import target


@target.emulated_only
def test_a_short_soak() -> None:
    seen = soak_device.soak(steps=15, seed=1, round_steps=5)
    assert not seen["wrong"]
    assert seen["races"] == 0
