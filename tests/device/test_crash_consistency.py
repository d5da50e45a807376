"""Steps that outlive the process, of a device with memory of its own: what the host updates is written through."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity.errors import ConfigError
from tests.behaviour.reference import Placement, Recipe, batches
from tests.device import target
from tests.device.training import engine_on, tiny, train_over

RECIPE = Recipe("bf16", clipping=0.5)
DATA = batches(5)


def start(path: Path, params: str, optimizer: str, *, keeps: bool) -> infinity.Engine:
    placement = Placement(params, optimizer, path, "64KiB")
    return engine_on(target.DEVICE, tiny(), RECIPE, placement, crash_consistent=keeps)


@pytest.mark.parametrize(("params", "optimizer"), [("nvme", "nvme"), ("cpu", "nvme"), ("none", "nvme")])
def test_a_run_that_is_closed_and_resumed_is_one_run(params, optimizer, tmp_path) -> None:
    with start(tmp_path / "whole", params, optimizer, keeps=False) as engine:
        expected = train_over(engine, DATA)
    with start(tmp_path / "kept", params, optimizer, keeps=True) as engine:
        losses = train_over(engine, DATA[:3])
    with start(tmp_path / "kept", params, optimizer, keeps=True) as engine:
        assert engine.resume()[0] is not None
        losses += train_over(engine, DATA[3:])
        engine.end_run()
    assert losses == expected
    assert not list((tmp_path / "kept").iterdir())


def test_states_that_stay_on_the_device_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="to nvme"):
        start(tmp_path, "none", "none", keeps=True)
