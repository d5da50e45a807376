"""`infinity selftest` on the emulated device: right as it is, and not with a wait taken away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from infinity.cli.main import main
from infinity.cli.selftest import all_checks
from infinity.cli.selftesting.outcome import Verdict, outcomes
from tests.behaviour.ranks import run_ranks
from tests.device import mutants, simdev, target
from tests.device.test_mutants import CASES
from tests.device.training import SPEEDS


def test_all_checks_pass_on_the_device(tmp_path, capsys) -> None:
    assert main(["selftest", "--device", target.DEVICE, "--path", str(tmp_path), "--json"]) == 0
    *checks, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["device"] == target.DEVICE
    assert (summary["right"], summary["wrong"], summary["refused"]) == (len(checks), 0, 0)
    assert {"host memory", "optimizer on the device", "races"} < {check["area"] for check in checks}


def first_wrong(mutant: str, speed: dict[str, float], path: Path) -> str | None:
    """Which check notices a wait that is taken away, in a process that has no other use."""
    simdev.load()
    simdev.configure(**speed)
    getattr(mutants, mutant)()
    device = torch.device("simdev")
    found = outcomes(all_checks(device, path), lambda text, share: None)
    return next((outcome.name for outcome in found if outcome.verdict is Verdict.WRONG), None)


@target.emulated_only
@pytest.mark.parametrize("mutant", dict.fromkeys(mutant.__name__ for mutant, *_ in CASES.values()))
def test_a_missing_wait_is_found(mutant, tmp_path) -> None:
    (tmp_path / "drive").mkdir()
    speeds = ({}, *SPEEDS.values())  # on a busy machine, what is missing may not show at once
    tried = (
        run_ranks(1, first_wrong, mutant, speed, tmp_path / "drive", path=tmp_path, timeout_s=120)[0]
        for speed in speeds
    )
    assert any(found is not None for found in tried)
