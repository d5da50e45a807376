"""`infinity bench-io`: the sweep, the comparison with fio, and what is cleaned up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.io import IoOptions
from infinity.io.sweep import SweepPoint, best_point

MIB = 1 << 20


def small(path: Path, *options: str) -> list[str]:
    return ["bench-io", "--path", str(path), "--size", "16MiB", "--runs", "2", "--block-size", "128KiB", *options]


def test_a_sweep_finds_a_setting_draws_it_and_writes_it_down(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    drive, config, plot = tmp_path / "drive", tmp_path / "config.json", tmp_path / "plot.png"
    drive.mkdir()
    config.write_text(json.dumps({"train_batch_size": 4, "aio": {"queue_depth": 1, "intra_op_parallelism": 2}}))
    outputs = ("--plot", str(plot), "--write-config", str(config))
    assert main([*small(drive, "--sweep", "--op", "read", "--json"), *outputs]) == 0
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (best,) = [point for point in points if point["best"]]
    written = json.loads(config.read_text())
    assert written["aio"]["block_size"] == best["block_size_bytes"]
    assert written["aio"]["queue_depth"] == best["queue_depth"]
    assert written["train_batch_size"] == 4
    assert written["aio"]["intra_op_parallelism"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not list(drive.iterdir())


def test_the_cheapest_of_the_fastest_settings_wins() -> None:
    def point(block: int, depth: int, rate: float) -> SweepPoint:
        return SweepPoint(IoOptions(block, depth), (rate, rate, rate * 3))

    cheap = point(MIB, 8, 98.0)
    assert best_point([point(8 * MIB, 64, 100.0), cheap, point(128 << 10, 1, 90.0)]) is cheap


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_runs_in_turn_on_the_same_file(tmp_path, capsys) -> None:
    assert main(small(tmp_path, "--compare-fio", "--op", "mixed", "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["fio"]["bytes_per_s"]["median"] > 0
    assert result["fio_ratio"] > 0
    assert not list(tmp_path.iterdir())


def test_a_missing_fio_is_said_before_anything_is_written(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(small(tmp_path, "--compare-fio")) == 2
    assert "fio is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_runtime_repeats_the_pass(tmp_path, capsys) -> None:
    start_s = time.monotonic()
    assert main(small(tmp_path, "--runtime", "0.3", "--op", "read", "--json")) == 0
    assert time.monotonic() - start_s > 0.6  # two runs


def test_a_plot_without_a_sweep_is_refused(tmp_path, capsys) -> None:
    assert main(small(tmp_path, "--plot", "x.png")) == 2
    assert "add --sweep" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_file(number, code, tmp_path) -> None:
    command = [sys.executable, "-m", "infinity.cli.main", *small(tmp_path, "--runtime", "60", "--op", "read")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as child:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.iterdir()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(0.5)
            child.send_signal(number)
            assert child.wait(timeout=30) == code
        finally:
            child.kill()
    assert not list(tmp_path.iterdir())
