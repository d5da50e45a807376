"""`infinity bench-io`: the sweep, the comparison with fio, and what is cleaned up."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infinity.cli import bench_io, profile
from infinity.cli.disk import job
from infinity.cli.disk.results import fio_facts, run_facts, show
from infinity.cli.disk.sweeping import plot_path
from infinity.cli.main import main
from infinity.io import IoOptions
from infinity.io.bench import BenchRun
from infinity.io.latency import Histogram, Latencies
from infinity.io.sweep import best_point
from infinity.io.sweep_plan import SweepPoint
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
    assert main([*small(drive, "--sweep", "--op", "read", "--runtime", "0.005", "--json"), *outputs]) == 0
    points = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (best,) = [point for point in points if point["best"]]
    written = json.loads(config.read_text())
    assert written["aio"]["block_size"] == best["block_size_bytes"]
    assert written["aio"]["queue_depth"] == best["queue_depth"]
    assert written["train_batch_size"] == 4
    assert written["aio"]["intra_op_parallelism"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not list(drive.iterdir())


def test_a_sweep_says_what_it_takes_and_fits_the_terminal(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(small(tmp_path, "--sweep", "--op", "mixed", "--runtime", "0.002")) == 0
    output = capsys.readouterr()
    assert re.search(r"writes at most [\d.]+ MiB\s+\(--max-write\s+64.00 GiB\)", output.err)
    assert re.search(r"sweep: takes about \d+ s more", output.err)
    assert re.search(r"^\* aio: block_size \d+, queue_depth \d+$", output.out, re.MULTILINE)
    assert "default" in output.out.splitlines()[-1] + output.out.splitlines()[-2]
    lines = [line for line in (output.out + output.err).splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80


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
    assert "p99_s" not in mixed["latency"]["read"]  # of 128 blocks it would be one
    assert mixed["iops"]["median"] == pytest.approx(mixed["bytes_per_s"]["median"] / (128 << 10))
    assert mixed["verified_bytes"] == 8 * MIB
    assert written["verified_bytes"] == 16 * MIB
    assert set(written["latency"]) == {"write"}
    parts = mixed["cpu_parts_s_per_gb"]
    assert parts["caller"] + parts["engine"] > 0
    assert mixed["queue_depth"] == 32  # training's own
    for result in (mixed, written):
        rates = result["bytes_per_s"]
        assert 0 < rates["min"] <= rates["median"] <= rates["max"]
        assert all(0 < seen["p50_s"] <= seen["p90_s"] for seen in result["latency"].values())
    assert not list(tmp_path.iterdir())


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
    options = ("--size", "8MiB", "--runs", "1", "--op", "randread", "--json")
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
        (("--sweep", "--verify"), "cannot be combined"),
        (("--runs", "0"), "at least 1"),
        (("--size", "900TiB"), "would fill the drive"),
        (("--size", "128KiB"), "too small"),
        (("--op", "erase"), "choose one of read, write, mixed, randread"),
        (("--backend", "libaio"), "does not exist"),
        (("--queue-depth", "0"), "--queue-depth is 0"),
        (("--path", "/does/not/exist"), "cannot use this path"),
        (("--path", "/tmp", "--path", "/tmp/."), "--path has /tmp twice: give each directory once"),
        (("--sweep", "--write-config", "/does/not/exist.json"), "there is no such directory"),
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
    assert result["moved_bytes"] == 32 * MIB  # beside the file's 16, and as much that settled how many passes


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
    options = ("--compare-fio", "--runtime", "0", "--op", "mixed", "--backend", backend, "--pages", "small", "--json")
    code = main(small(tmp_path, *options))
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


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("operation", ["read", "mixed"])
def test_fio_measures_the_drive_of_a_relative_path(operation, tmp_path, capsys, monkeypatch) -> None:
    """It ran in a directory of its own, where it made another file, on another drive."""
    drive = tmp_path / "a b:c"
    drive.mkdir()
    monkeypatch.chdir(tmp_path)
    options = ["--path", drive.name, "--op", operation, "--compare-fio", "--runtime", "0", "--json"]
    seen: list[int] = []
    unlink = Path.unlink

    def noted(path: Path, **more: bool) -> None:
        seen.append(len(list(drive.iterdir())))
        unlink(path, **more)

    monkeypatch.setattr(Path, "unlink", noted)
    assert main([*small(tmp_path, *options)[:1], *small(tmp_path)[3:], *options]) == 0
    (result,) = lines(capsys)
    assert result["path"] == str(drive)
    assert result["fio"]["moved_bytes"] == result["moved_bytes"]
    assert seen == [1]  # fio has made no file of its own beside ours


def test_paths_are_absolute_before_they_are_kept_or_handed_over(tmp_path, monkeypatch) -> None:
    """By a sweep that goes on, a profile, a process that measures for `tune`."""
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    bench_io.add_parser(subparsers)
    profile.add_parser(subparsers)
    config = {"tiering": {"nvme": [{"path": "nvme"}]}}
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 1, **config}))
    for given, expected in (((), tmp_path), (("--path", "nvme"), tmp_path / "nvme")):
        assert job.job_of(parser.parse_args(["bench-io", *given])).paths == (expected,)
        assert profile._job(parser.parse_args(["profile", *given])).paths == (expected,)
    given = ("--config", "config.json")
    assert job.job_of(parser.parse_args(["bench-io", *given])).paths == (tmp_path / "nvme",)
    assert profile._job(parser.parse_args(["profile", *given])).paths == (tmp_path / "nvme",)


def test_beside_fio_a_run_takes_seconds_unless_it_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(job, "fio_version", lambda: "fio-3")
    parser = argparse.ArgumentParser()
    bench_io.add_parser(parser.add_subparsers())

    def runtime_s(*options: str) -> float:
        return job.job_of(parser.parse_args(small(tmp_path, *options))).runtime_s

    assert runtime_s("--compare-fio") == 3.0
    assert runtime_s("--compare-fio", "--runtime", "1") == 1.0
    assert runtime_s() == 0.0
    assert runtime_s("--sweep") == 0.5


def test_what_is_shown_of_both_and_their_ratio_agree(capsys, monkeypatch, tmp_path) -> None:
    """Also where the median of the ratios is another one; and nothing is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    seen = Histogram(tuple((1e-3 * (1 + i / 50), 500) for i in range(40)))
    ours = [BenchRun(3.0, int(rate * 3e9), 0.5, blocks=3000, latencies=Latencies(seen, seen)) for rate in (1, 2, 5)]
    theirs = [replace(run, seconds=seconds) for run, seconds in zip(ours, (1.0, 9.0, 3.0), strict=True)]
    facts = {
        "op": "mixed",
        "backend": "io_uring",
        "block_size_bytes": MIB,
        "queue_depth": 32,
        "path": "/nvme",
        **run_facts(ours),
        **fio_facts(ours, theirs, ["fio"]),
        "warnings": ["a virtual disk: its host may cache, so compare ratios rather than trust the rates"],
    }
    parser = argparse.ArgumentParser()
    bench_io.add_parser(parser.add_subparsers())
    show(facts, job.job_of(parser.parse_args(small(tmp_path))))
    output = capsys.readouterr().out
    shown, fios = (float(rate) for rate in re.findall(r"bw +([\d.]+) GB/s", output))
    ratio = float(re.search(r"ratio +([\d.]+) of fio", output)[1])
    assert ratio == pytest.approx(shown / fios, abs=0.005)
    assert "(0.33 to 3.00 in pairs of runs)" in output
    assert max(map(len, output.splitlines())) <= 80
    assert "p999" in output
    for line in output.splitlines()[1:]:
        assert line.startswith("  "), line


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
        deadline = time.monotonic() + 60
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)
        child.send_signal(number)
        output, _ = child.communicate(timeout=30)
        assert child.returncode == code
    assert not list(tmp_path.iterdir())
    result = json.loads(output)
    assert result["interrupted"]
    assert result["bytes_per_s"]["median"] > 0
