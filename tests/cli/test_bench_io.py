"""`infinity bench-io`: the sweep, the comparison with fio, and what is cleaned up."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from infinity.cli.disk.sweeping import plot_path
from infinity.cli.main import main
from infinity.io import IoOptions
from infinity.io.sweep import SweepPoint, best_point
from tests.prepared import Child

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


def lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_result_has_rates_cpu_and_latency_under_load(tmp_path, capsys) -> None:
    assert main(small(tmp_path, "--op", "mixed", "--op", "randwrite", "--verify", "--json")) == 0
    mixed, written = lines(capsys)
    assert mixed["op"] == "mixed"
    assert set(mixed["latency"]) == {"read", "write"}
    assert mixed["latency"]["read"]["samples"] == 2 * 64  # two runs over half the file
    assert mixed["latency"]["read"]["p50_s"] > 0
    assert "p99_s" not in mixed["latency"]["read"]  # of 128 blocks it would be one
    assert mixed["iops"]["median"] == pytest.approx(mixed["bytes_per_s"]["median"] / (128 << 10))
    assert mixed["verified_bytes"] == 8 * MIB
    assert written["verified_bytes"] == 16 * MIB
    assert set(written["latency"]) == {"write"}
    parts = mixed["cpu_parts_s_per_gb"]
    assert parts["caller"] + parts["engine"] > 0
    assert mixed["queue_depth"] == 32  # training's own


def test_several_paths_are_measured_together_too(tmp_path, capsys) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    for place in places:
        place.mkdir()
    options = ("--size", "8MiB", "--runs", "1", "--op", "read", "--block-size", "128KiB", "--json")
    assert main(["bench-io", "--path", str(places[0]), "--path", str(places[1]), *options]) == 0
    first, second, together = lines(capsys)
    assert [first["path"], second["path"]] == [str(place) for place in places]
    assert [place["path"] for place in together["paths"]] == [str(place) for place in places]
    assert together["bytes_per_s"]["median"] > 0
    assert "on one drive" in together["warnings"][0]
    assert not [file for place in places for file in place.iterdir()]


def test_a_configuration_says_how_training_does_it(tmp_path, capsys) -> None:
    config = tmp_path / "config.json"
    drive = tmp_path / "drive"
    drive.mkdir()
    aio = {"block_size": "256KiB", "queue_depth": 4}
    config.write_text(json.dumps({"train_batch_size": 1, "aio": aio, "tiering": {"nvme": [{"path": str(drive)}]}}))
    options = ("--size", "8MiB", "--runs", "1", "--op", "read", "--json")
    assert main(["bench-io", "--config", str(config), *options, "--backend", "threads"]) == 0
    (result,) = lines(capsys)
    assert (result["block_size_bytes"], result["queue_depth"]) == (256 << 10, 4)
    assert (result["path"], result["backend"]) == (str(drive), "threads")


def test_what_goes_through_the_page_cache_is_said(tmp_path, capsys) -> None:
    assert main(small(tmp_path, "--op", "read", "--buffered", "--json")) == 0
    (result,) = lines(capsys)
    assert not result["direct"]
    assert any("page cache" in warning or "lies in memory" in warning for warning in result["warnings"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--verify", "--op", "read"), "writes nothing"),
        (("--max-write", "1MiB"), "raise it, or lower --size"),
        (("--sweep", "--op", "write", "--max-write", "20MiB"), "--max-write leaves"),
        (("--sweep", "--max-write", "1MiB"), "the files alone take 16.00 MiB"),
        (("--resume", "x"), "add --sweep"),
        (("--sweep", "--verify"), "goes without"),
        (("--runs", "0"), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(options, words, tmp_path, capsys) -> None:
    assert main(small(tmp_path, *options)) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_runtime_stops_at_what_may_be_written(tmp_path, capsys) -> None:
    options = ("--op", "write", "--runs", "1", "--runtime", "60", "--max-write", "80MiB", "--json")
    assert main(small(tmp_path, *options)) == 0
    (result,) = lines(capsys)
    assert result["moved_bytes"] == 64 * MIB  # beside the file's 16


def test_pictures_of_several_sweeps_have_names_of_their_own(tmp_path) -> None:
    one, other = tmp_path / "a" / "nvme", tmp_path / "b" / "nvme"
    places = [one, other, tmp_path / "c"]
    names = [plot_path(Path("out.png"), place, op, places).name for place in places for op in ("read", "write")]
    assert len(set(names)) == 6
    assert names[0] == "out-read-nvme-1.png"
    assert names[-1] == "out-write-c.png"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_fio_runs_in_turn_on_the_same_file(backend, tmp_path, capsys) -> None:
    code = main(small(tmp_path, "--compare-fio", "--op", "mixed", "--backend", backend, "--json"))
    if code == 2 and "does not work here" in capsys.readouterr().err:
        pytest.skip(f"no {backend} here")
    (result,) = lines(capsys)
    fio = result["fio"]
    assert fio["moved_bytes"] == result["moved_bytes"] == 32 * MIB
    assert fio["bytes_per_s"]["median"] > 0
    assert fio["latency"]["read"]["samples"] > 0
    assert result["fio_ratio"]["bytes_per_s"] > 0
    assert result["huge_page_bytes"] in (0, None)  # as fio's memory has none
    assert ("--ioengine=psync" in fio["command"]) == (backend == "threads")
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
def test_a_signal_leaves_no_file_and_what_was_measured(number, code, tmp_path) -> None:
    options = small(tmp_path, "--runtime", "60", "--op", "read", "--json")
    with Child(["-m", "infinity.cli.main", *options]) as child:
        try:
            deadline = time.monotonic() + 60
            while not list(tmp_path.iterdir()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(1.5)
            child.send_signal(number)
            output, _ = child.communicate(timeout=30)
            assert child.returncode == code
        finally:
            child.kill()
    assert not list(tmp_path.iterdir())
    result = json.loads(output)
    assert result["interrupted"]
    assert result["bytes_per_s"]["median"] > 0
