"""`infinity bench-adam` on a few thousand parameters: what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infinity import kernels
from infinity.cli.arguments import program_argument
from infinity.cli.main import main


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = kernels.thread_count(), torch.get_num_threads()
    yield
    kernels.set_threads(threads[0])
    torch.set_num_threads(threads[1])


def test_it_prints_a_json_line_for_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--size", "4K", "--threads", "1", "--format", "fp32", "split", "int8", "--rounds", "3", "--json"]
    assert main(["bench-adam", *arguments]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["name"] for record in records] == ["bare loop", "fp32", "split", "int8", "triad", "torch fused"]
    for record in records:
        assert len(record["seconds"]) == 3
        assert record["params_per_s"] == pytest.approx(4000 / sorted(record["seconds"])[1])
    assert [record["bytes_per_param"] for record in records[:3]] == [28, 28, 26]
    ratio = records[1]["speed_relative_to"]["torch fused"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    of_triad = records[1]["bandwidth_relative_to_triad"]
    assert of_triad["low"] <= of_triad["median"] <= of_triad["high"]
    assert records[4]["bandwidth_relative_to_triad"]["median"] == 1


def test_a_peer_that_cannot_work_is_an_error_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-adam", "--size", "4K", "--threads", "1", "--peer-python", "/nonexistent"]) == 2
    assert "--peer-python /nonexistent does not start" in capsys.readouterr().err
    import_fails = Path(sys.executable)  # an environment without DeepSpeed
    assert main(["bench-adam", "--size", "4K", "--threads", "1", "--peer-python", str(import_fails)]) == 2
    assert "deepspeed" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "0"], ["--format", "fp8"]])
def test_bad_numbers_and_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-adam", "--size", "4K", *arguments]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_peer_compiles_into_a_directory_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    """Which is gone afterwards: nobody else can have put an operator into it."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    told = tmp_path / "told"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nstat -c "%a %n" "$TORCH_EXTENSIONS_DIR" > {told}\nexit 1\n')
    python.chmod(0o700)
    assert main(["bench-adam", "--size", "4K", "--threads", "1", "--peer-python", str(python)]) == 2
    mode, directory = told.read_text().split()
    assert mode == "700"
    assert not Path(directory).exists()


def test_a_peer_s_python_is_an_absolute_path_or_in_path(tmp_path, monkeypatch) -> None:
    """`./python` was looked for in PATH, under its name alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert program_argument("./python") == tmp_path / "python"
    assert program_argument(Path(sys.executable).name) == Path(sys.executable)
    with pytest.raises(argparse.ArgumentTypeError, match="no-such-program' is no program in PATH; give its path"):
        program_argument("no-such-program")


def test_more_parameters_than_memory_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench-adam", "--size", "4K", "1e17"]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "--size 100000000000000000: states of so many parameters take" in shown.err
