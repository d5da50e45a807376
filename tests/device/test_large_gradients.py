"""A norm that is measured on the device is finite if its gradients are, as the host's is."""

from __future__ import annotations

import pytest

from infinity.zero.foresight import Foresight
from tests.behaviour.reference import Placement, batches
from tests.behaviour.test_large_gradients import FACTORS, Clipped, assert_same, recipe_of, train_scaled
from tests.device import target
from tests.device.training import engine_on, tiny


def train_on(device: str, precision: str, placement: Placement) -> Clipped:
    with engine_on(device, tiny(), recipe_of(precision), placement) as engine:
        return train_scaled(engine, batches(len(FACTORS)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("params", "states", "schedule"),
    [
        ("none", "none", "deferred"),
        ("cpu", "cpu", "speculative"),
        ("nvme", "nvme", "speculative"),
        ("nvme", "nvme", "barrier"),
    ],
)
def test_the_bits_are_those_of_the_cpu(params, states, schedule, precision, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Foresight, "speculates", True)
    found = train_on(target.DEVICE, precision, Placement(params, states, tmp_path, "64KiB", schedule=schedule))
    assert_same(found, train_on(target.REFERENCE, precision, target.PLAIN))
