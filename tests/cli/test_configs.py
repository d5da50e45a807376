"""The ready configurations are found by name, wherever the command is started."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.cli.ready import config_argument, ready_configurations
from infinity.config import load_config

ROOT = Path(__file__).parents[2]


def test_they_are_listed_and_printed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    for path in (ROOT / "configs").glob("*.json"):
        assert f"\n{path.stem} " in f"\n{listed}"
    assert "stage 3, bf16, all states on NVMe, host_memory 768.00 MiB" in listed
    assert main(["configs", "nvme"]) == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "mine.json") == load_config(ROOT / "configs" / "nvme.json")
    assert main(["configs", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["cpu"]).is_file()


def test_a_name_stands_for_a_ready_one_and_a_file_of_the_name_comes_first(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_argument("nvme") == ready_configurations()["nvme"]
    assert main(["estimate", "--model", "gpt2:tiny", "--config", "cpu", "--json"]) == 0
    Path("nvme").write_text("{}")
    assert config_argument("nvme") == Path("nvme")
    assert config_argument("other.json") == Path("other.json")


def test_an_unknown_name_is_refused_with_the_nearest(capsys) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"nvmee is neither a file nor .* did you mean nvme"):
        config_argument("nvmee")
    assert main(["configs", "mine"]) == 2
    assert "`infinity configs` lists them" in capsys.readouterr().err


def test_the_build_installs_them() -> None:
    assert "install(DIRECTORY configs/ DESTINATION infinity/configs" in (ROOT / "CMakeLists.txt").read_text()
