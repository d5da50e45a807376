"""`infinity checkpoint`: what it says, and what it writes."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from infinity.checkpoint.conversion import checkpoint_at
from infinity.checkpoint.format import read_manifest
from infinity.checkpoint.inspection import trained_values
from infinity.cli.main import main
from tests.api.small_models import engine_of, train, weights


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Two checkpoints, and the weights of the last one."""
    with engine_of() as engine:
        for _ in range(2):
            train(engine)
            engine.save_checkpoint(tmp_path / "saved")
        return tmp_path / "saved", weights(engine)


def said(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["checkpoint", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_says_what_it_is_and_what_is_missing(saved, capsys) -> None:
    directory, values = saved
    found = said(capsys, "inspect", str(directory))
    assert found["path"] == str(directory / "global_step2")
    assert (found["global_steps"], found["ranks"], found["state_format"]) == (2, 1, "fp32")
    assert found["trained_parameters"] == sum(value.numel() for value in values.values())
    assert found["nbytes"] == 12 * found["trained_parameters"]
    assert (found["tags"], found["latest"], found["missing"]) == (["global_step1", "global_step2"], "global_step2", [])
    (directory / "global_step1" / "extra.pt").unlink()
    assert said(capsys, "inspect", str(directory), "--tag", "global_step1")["missing"] == ["extra.pt"]
    assert main(["checkpoint", "inspect", str(directory / "global_step1")]) == 0
    text = capsys.readouterr().out
    assert "saved by     1 rank, files: 1" in text
    assert "here         global_step1 global_step2*" in text
    assert "missing      extra.pt" in text


def test_verify_reads_all_and_names_what_is_damaged(saved, capsys) -> None:
    directory, _ = saved
    assert said(capsys, "verify", str(directory))["whole"] is True
    assert main(["checkpoint", "verify", str(directory)]) == 0
    assert "global_step2: whole, " in capsys.readouterr().out
    file = directory / "global_step2" / "unit-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(directory)]) == 2
    assert "unit-00000.safetensors is damaged: tensor exp_avg_sq." in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(directory), "--tag", "global_step1"]) == 0
    assert main(["checkpoint", "verify", str(directory / "nowhere")]) == 2


def test_a_checkpoint_that_is_saved_meanwhile_changes_nothing(saved, monkeypatch) -> None:
    directory, values = saved

    def found_before(source: Path, tag: str | None = None) -> Path:
        path = checkpoint_at(source, tag)
        (directory / "latest").write_text("global_step1")
        return path

    monkeypatch.setattr("infinity.checkpoint.inspection.checkpoint_at", found_before)
    found = trained_values(directory)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_verify_draws_one_line_for_all_of_its_threads(saved, monkeypatch) -> None:
    drawings = []

    class SlowDrawing:
        def __init__(self, picture: Any) -> None:
            time.sleep(0.02)
            drawings.append(self)

        def draw(self) -> None: ...

        def end(self) -> None: ...

    def verified(source: Path, tag: str | None, show: Any) -> tuple[Path, Any]:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(show, [1] * 8))
        return source, read_manifest(source / "global_step2")

    monkeypatch.setattr("infinity.cli.progress.Drawing", SlowDrawing)
    monkeypatch.setattr("infinity.cli.progress.is_terminal", lambda: True)
    monkeypatch.setattr("infinity.checkpoint.inspection.verify", verified)
    assert main(["checkpoint", "verify", str(saved[0])]) == 0
    assert len(drawings) == 1


def test_reshard_writes_it_again(saved, tmp_path, capsys) -> None:
    directory, values = saved
    assert said(capsys, "reshard", str(directory), str(tmp_path / "same"))["state_format"] == "fp32"
    with engine_of(seed=5) as engine:
        engine.load_checkpoint(tmp_path / "same")
        for name, value in engine.named_parameters():
            assert torch.equal(value, values[name])
    other = said(capsys, "reshard", str(directory), str(tmp_path / "int8"), "--state-format", "int8")
    assert read_manifest(tmp_path / "int8" / "global_step2").state_format == "int8"
    assert other["bytes"] < 7 * sum(value.numel() for value in values.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_writes_the_weights(dtype, saved, tmp_path, capsys) -> None:
    directory, values = saved
    found = said(capsys, "export", str(directory), str(tmp_path / "out"), "--dtype", dtype)
    assert found["files"] == ["model.safetensors"]
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(exported[name], value.to(getattr(torch, dtype))), name
