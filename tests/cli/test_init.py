"""`infinity init` measures, and writes a configuration that trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.cli import init
from infinity.cli.main import main
from infinity.cli.training import precision
from infinity.config import load_config
from tests.cli.test_profile import small_products

__all__ = ["small_products"]  # a fixture


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_products: None) -> Path:
    """A directory, and short measurements."""
    monkeypatch.setattr(init, "_FILE_BYTES", 16 << 20)
    monkeypatch.setattr(init, "_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("chosen", ["fp32", "bf16"])
def test_a_configuration_is_written_and_trains(chosen, quick, monkeypatch, capsys) -> None:
    slow = "bf16" if chosen == "fp32" else "fp32"
    monkeypatch.setattr(
        precision, "product_seconds", lambda device, names: {name: 4.0 if name == slow else 1.0 for name in names}
    )
    assert main(["init", "--nvme", "a", "--nvme", "b", "--profile", "profile.json"]) == 0
    shown = capsys.readouterr().out
    assert f"precision: {chosen}; matrix products in bf16 take " in shown
    assert "next: infinity train MODEL DATA --config infinity.json" in shown
    config = load_config("infinity.json")
    assert config.precision == chosen
    assert [nvme.path for nvme in config.tiering.nvme] == [quick / "a", quick / "b"]
    assert all(nvme.bytes_per_s for nvme in config.tiering.nvme)
    assert list((quick / "a").iterdir()) == []
    (quick / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    train = ["train", "gpt2:tiny", "text.txt", "--config", "infinity.json", "--steps", "1", "--seq-len", "64"]
    assert main(train) == 0
    assert main(["plan", "--model", "gpt2:tiny", "--config", "infinity.json", "--profile", "profile.json"]) == 0
    capsys.readouterr()
    assert main(["init", "--nvme", "a"]) == 2
    assert "infinity.json already exists" in capsys.readouterr().err


def test_what_is_measured_is_json_too(quick, capsys) -> None:
    command = ["init", "--nvme", "a", "--output", "mine.json", "--host-memory", "1GiB", "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["profile"]["drives"][0]["path"] == "a"
    assert facts["product_s"].keys() == {"fp32", "bf16"}
    assert load_config("mine.json").tiering.host_memory_bytes == 1 << 30


def test_a_path_that_cannot_be_used_is_named(quick, capsys) -> None:
    (quick / "file").touch()
    assert main(["init", "--nvme", "file"]) == 2
    assert "--nvme file: " in capsys.readouterr().err
    assert not (quick / "infinity.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output", "folder", "--force"], "--output folder is a directory: give a file"),
        (["--output", "nowhere/mine.json"], "--output nowhere/mine.json: there is no such directory"),
        (["--profile", "nowhere/profile.json"], "--profile nowhere/profile.json: there is no such directory"),
        (["--host-memory", "2gigs"], "tiering.host_memory: '2gigs' is not a size"),
        (["--nvme", "file/swap"], "file is no directory: give another path"),
        (["--nvme", "./swap"], "--nvme has swap twice"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(options, message, quick, capsys, monkeypatch) -> None:
    monkeypatch.setattr(init, "_measured", pytest.fail)
    (quick / "folder").mkdir()
    (quick / "file").touch()
    assert main(["init", "--nvme", "swap", *options]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in quick.iterdir()} == {"folder", "file"}
