"""`infinity selftest` on the CPU: right as it is, and not with a fault in the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infinity
from infinity.cli.main import main
from infinity.cli.selftesting import parity
from infinity.cli.selftesting.outcome import Check, Verdict, outcomes
from infinity.cli.selftesting.parity import RECIPES, Parity
from infinity.cli.selftesting.training import Place, batches, config_of, decoder, train
from infinity.optim import pipeline

CPU = torch.device("cpu")


def test_everything_is_right_on_this_machine(tmp_path, monkeypatch, capsys) -> None:
    """With a sixteenth of the large units' bytes, whose copies last long enough for a race on a device only."""
    monkeypatch.setattr(parity, "_RACE", replace(parity._RACE, width=256))
    assert main(["selftest", "--device", "cpu", "--path", str(tmp_path), "--json"]) == 0
    *checks, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert {check["area"] for check in checks} == {"plain torch", "placements", "schedules and formats", "races"}
    assert all(check["verdict"] == "right" and not check["words"] for check in checks)
    assert summary["device"] == "cpu"
    assert (summary["right"], summary["wrong"], summary["refused"]) == (len(checks), 0, 0)
    assert not list(tmp_path.iterdir())


def test_units_and_states_come_and_go(tmp_path) -> None:
    """Else the placements would be one."""
    place = Parity(CPU, tmp_path)._tight(Place("nvme", "nvme"))
    config = config_of(RECIPES[0], place, tmp_path)
    with infinity.initialize(model=decoder(64, 4), config=config, device=CPU)[0] as engine:
        read, written, steps = 0, 0, 4
        for ids in batches(steps):
            engine.train_batch([ids])
            read += engine.stats().tier_bytes["nvme_read"]  # of a step, or of the one before if its reads began late
            written += engine.stats().tier_bytes["nvme_write"]
        numel = sum(param.numel() for param in engine.module.parameters())
        assert read > (steps - 1) * 8 * numel  # parameters twice, and states
        assert written > (steps - 1) * 6 * numel


def test_an_update_that_is_wrong_on_the_drive_alone_is_found(tmp_path, monkeypatch) -> None:
    update = pipeline.update

    def wrong(layout, param, states, grad, *rest, **more):
        if param.numel() < 40_000:  # tiles are smaller than units
            grad = grad * 1.5
        return update(layout, param, states, grad, *rest, **more)

    monkeypatch.setattr(pipeline, "update", wrong)
    reference = train(RECIPES[0], Place("none", "none", "barrier", {"tile_size": "16MiB"}), CPU, tmp_path)
    check = Check("", "", lambda: train(RECIPES[0], Place("nvme", "nvme"), CPU, tmp_path).difference(reference))
    (outcome,) = outcomes([check], lambda text, share: None)
    assert outcome.verdict is Verdict.WRONG
    assert "parameters have other bits, by up to" in outcome.words


@pytest.mark.parametrize(
    ("check", "verdict", "words"),
    [
        (lambda: "", Verdict.RIGHT, ""),
        (lambda: "other bits", Verdict.WRONG, "other bits"),
        (lambda: 1 / 0, Verdict.WRONG, "ZeroDivisionError: division by zero"),
        (lambda: infinity.load_config({"nonsense": 1}), Verdict.REFUSED, "nonsense"),
    ],
)
def test_what_comes_of_a_check(check, verdict, words) -> None:
    (outcome,) = outcomes([Check("area", "name", check)], lambda text, share: None)
    assert outcome.verdict is verdict
    assert words in outcome.words


def test_what_is_wrong_is_printed_and_ends_with_1(tmp_path, monkeypatch, capsys) -> None:
    checks = [
        Check("placements", "drive", lambda: "3 of 9 parameters have other bits"),
        Check("placements", "memory", lambda: ""),
    ]
    monkeypatch.setattr("infinity.cli.selftest.all_checks", lambda device, path: checks)
    assert main(["selftest", "--device", "cpu", "--path", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "placements" in printed
    assert "1 of 2 right" in printed
    assert "WRONG  drive: 3 of 9 parameters have other bits" in printed
    assert "do not train here" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "warp"], "--device warp: there is no such kind of device; choose cpu"),
        (["--device", "cuda:7"], "--device cuda:7: torch does not see it; choose cpu"),
        (["--path", "/nowhere"], "--path /nowhere: there is no such directory"),
    ],
)
def test_bad_arguments_are_named(arguments, words, capsys) -> None:
    assert main(["selftest", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_it_leaves_torch_as_it_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("infinity.cli.selftest.all_checks", lambda device, path: [])
    state, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    assert main(["selftest", "--device", "cpu", "--path", str(tmp_path), "--json"]) == 0
    decoder(8 * 4, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
