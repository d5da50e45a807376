"""Paths as people write them: those that a shell would replace are replaced, and what is no path is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.cli.main import main
from infinity.config import expanded_path, load_config
from infinity.errors import ConfigError

REFUSED = [
    ("file:///local_nvme", "is a URL"),
    ("s3://bucket/swap", "is a URL"),
    ("D:\\swap", "is a path of Windows"),
    ("D:/swap", "is a path of Windows"),
    ("/data/$NOT_SET_HERE/swap", r"names \$NOT_SET_HERE, which is not set"),
    ("/data/${NOT_SET_HERE}", r"names \$\{NOT_SET_HERE\}, which is not set"),
    ("~nobody_of_this_name/swap", "names a user's home that does not exist"),
]


def test_home_and_variables_are_replaced(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert expanded_path("~/swap") == "/home/me/swap"
    assert expanded_path("$SCRATCH/a") == expanded_path("${SCRATCH}/a") == "/scratch/a"
    for plain in ("/local_nvme", "swap", "a~b", "./~", "C", "a:b"):
        assert expanded_path(plain) == plain


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_would_make_a_directory_of_that_name_is_refused(text, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": text}}
    for values in (
        {"train_batch_size": 2, "zero_optimization": offload},
        {"train_batch_size": 2, "tiering": {"nvme": [{"path": text}]}},
    ):
        with pytest.raises(ConfigError, match=words) as refusal:
            load_config(values, world_size=1)
        assert "path" in str(refusal.value)
    with pytest.raises(SystemExit):
        main(["bench-io", "--path", text, "--size", "1MiB"])
    assert "argument --path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_empty_path_is_not_the_working_directory(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("--nvme", "--output", "--save-dir", "--data"):
        with pytest.raises(SystemExit):
            main(["train", "gpt2:tiny", f"{option}="])
        assert f'argument {option}: the path is empty; give "."' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["a\0b", "\ud800"])
def test_what_no_file_can_be_called_is_refused(text, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for option in ("--nvme", "--output", "--data", "--tokenizer", "--config"):
        with pytest.raises(SystemExit):
            main(["train", "gpt2:tiny", option, text])
        assert f"argument {option}: {text!r} must be a path: not empty, without null" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_configuration_has_the_expanded_path(monkeypatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    config = load_config({"train_batch_size": 2, "tiering": {"nvme": [{"path": "$SCRATCH/swap"}]}}, world_size=1)
    assert [drive.path for drive in config.tiering.nvme] == [Path("/scratch/swap")]
