"""`infinity timeline` sums up and draws what `tiering.timeline` wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.telemetry import Lane, Timeline, Times


@pytest.fixture
def trace(tmp_path) -> Path:
    """Two steps of a second each; the disk is read in a half of the first, for which the compute thread waits."""
    timeline = Timeline(tmp_path / "trace.json", ["block"], steps=10)

    def ran(lane: Lane, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        timeline.record(lane, name, Times(start_s, start_s, end_s), 0 if nbytes else None, nbytes)

    for begin_s in (10.0, 12.0):
        ran(Lane.PHASE, "forward", begin_s, begin_s + 0.6)
        ran(Lane.PHASE, "update", begin_s + 0.6, begin_s + 1.0)
        if begin_s == 10.0:
            ran(Lane.PREFETCH, "states", 10.25, 10.75, 1 << 30)
            ran(Lane.WAIT, "disk_read", 10.25, 10.75)
        timeline.end_step()
    timeline.close()
    return tmp_path / "trace.json"


def test_json(trace, capsys) -> None:
    assert main(["timeline", str(trace), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["steps"] == [1, 2]
    assert facts["wall_s"] == pytest.approx(2.0)
    assert facts["lanes"]["prefetch"]["share"] == pytest.approx(0.25)
    assert facts["lanes"]["prefetch"]["bytes"] == 1 << 30
    assert facts["lanes"]["prefetch"]["bytes_per_s"] == pytest.approx(2 << 30)
    assert facts["waits_s"] == {"disk_read": pytest.approx(0.5)}
    assert main(["timeline", str(trace), "--json", "--steps", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["waits_s"] == {}


def test_table(trace, capsys) -> None:
    assert main(["timeline", str(trace), "--steps", "1-1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["1", "steps,"]
    assert ["prefetch", "0.500", "s", "50%", "1.00", "GiB", "2.15"] in lines
    assert ["waits", "for", "disk", "read", "0.500", "s", "50%"] in lines


def test_picture(trace, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert main(["timeline", str(trace), "--png", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert main(["timeline", str(trace), "--png", str(tmp_path / "out.xyz")]) == 2
    assert "--png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "missing.json cannot be read"),
        (["{trace}", "--steps", "2-4"], "has steps 1 to 2, not steps 2 to 4"),
        (["{trace}", "--steps", "7"], "not step 7"),
    ],
)
def test_errors(arguments, message, trace, capsys) -> None:
    assert main(["timeline", *(argument.format(trace=trace) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["x", "3-1", "-2"])
def test_a_range_that_is_none(steps, trace, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["timeline", str(trace), f"--steps={steps}"])
    assert "--steps" in capsys.readouterr().err
