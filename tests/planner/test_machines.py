"""Plans for machines that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from infinity.cli.main import main
from infinity.planner.machines import MACHINES

SMALL = ["plan", "--params", "50e6", "--checkpoint-activations", "--seq-len", "256", "--json"]


def planned(capsys, *more: str) -> dict:
    assert main([*SMALL, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_machine_has_all_that_a_step_needs(capsys) -> None:
    for name in MACHINES:
        step = planned(capsys, "--emulate", name, "--offload-param", "cpu", "--offload-optimizer", "cpu")["step"]
        assert step["step_s"] > 0
        assert not step["unknown"]


def test_what_the_command_line_says_comes_first(capsys, tmp_path) -> None:
    homes = ("--offload-param", "cpu", "--offload-optimizer", "cpu")
    slow = planned(capsys, "--emulate", "H200", "--flops", "1e12", *homes)["step"]["parts_s"]["compute"]
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(asdict(MACHINES["H200"]) | {"flops": 1e12}))
    assert planned(capsys, "--emulate", str(file), *homes)["step"]["parts_s"]["compute"] == pytest.approx(slow)


def test_states_on_the_device_put_nothing_on_the_link_and_sums_leave_once(capsys) -> None:
    def link_s(*more: str) -> float:
        plan = planned(capsys, "--emulate", "H200", "--offload-param", "none", *more)
        return plan["step"]["parts_s"]["link"]

    once = link_s("--offload-optimizer", "cpu")
    assert once > 0
    assert link_s("--offload-optimizer", "none") == 0
    assert link_s("--offload-optimizer", "cpu", "--accumulation", "8") < 3 * once  # twice the bytes, in float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such machine; there are H200"),
        ("{", "cannot be read"),
        ("{}", "must be an object with these numbers and no others: device_memory"),
        (json.dumps(asdict(MACHINES["4090"]) | {"link": -1}), "link is -1; it must be a number above 0"),
    ],
)
def test_what_is_no_machine_is_refused(content, message, tmp_path, capsys) -> None:
    name = "GTX"
    if content is not None:
        (tmp_path / "machine.json").write_text(content)
        name = str(tmp_path / "machine.json")
    assert main([*SMALL, "--emulate", name]) == 2
    assert message in capsys.readouterr().err
