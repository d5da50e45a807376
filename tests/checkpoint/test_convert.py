"""A checkpoint in one state format becomes one in another: exact, or within the format's error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import convert, latest_tag
from infinity.checkpoint.conversion import moments_of
from infinity.checkpoint.format import read_manifest
from infinity.checkpoint.stored import StoredReader
from infinity.cli.main import main
from infinity.optim.formats import FORMATS, state_layout
from tests.behaviour.reference import Placement, Recipe, batches, tiny_llama, train_on
from tests.checkpoint.common import make_engine

ENGINE_FORMATS = {"fp32": "fp32", "split": "bf16", "bf16": "bf16", "int8": "bf16"}  # format: precision
# Largest error of a moment, relative to itself and to the largest of its block, of the format that loses more.
ERRORS = {"fp32": (0, 0), "split": (0, 0), "master": (0, 0), "bf16": (2**-7, 0), "int8": (1 / 16, 1 / 1000)}


def recipe(state_format: str) -> Recipe:
    config = {"tiering": {"tile_size": "64KiB", "state_format": state_format}}
    return Recipe(ENGINE_FORMATS[state_format], clipping=0.5, extra=config)


def build(seed: int) -> torch.nn.Module:
    """With a frozen parameter, and trained ones whose length is no multiple of a block."""
    model = tiny_llama(seed)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.odd = torch.nn.Parameter(torch.randn(7, 111))
    model.register_forward_hook(_use_odd)
    return model


def _use_odd(model, args, output):
    output.loss = output.loss + model.odd.square().mean()
    return output


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """A checkpoint in every format that an engine trains in."""
    directories = {}
    for name in ENGINE_FORMATS:
        directories[name] = tmp_path_factory.mktemp(name)
        with make_engine(Placement(), recipe(name), build=build) as engine:
            train_on(engine, batches(4))
            engine.save_checkpoint(directories[name], client_state={"format": name})
    return directories


def values(directory: Path) -> dict[str, torch.Tensor]:
    """Masters, moments and frozen parameters of the last checkpoint, by key, in float32."""
    path = directory / str(latest_tag(directory))
    manifest = read_manifest(path)
    fp32 = state_layout("fp32")
    found = {}
    with StoredReader(path, manifest.tensors) as reader:
        for key, entry in manifest.tensors.items():
            field, _, name = key.partition(".")
            numel = torch.Size(entry.shape).numel()
            if field in ("master", "param"):
                found[key] = reader.read(key, 0, numel).float()
            if field == "master":
                for moment, read in moments_of(reader, manifest.layout, fp32, name, 0, numel).items():
                    found[f"{moment}.{name}"] = read
    return found


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], lossy: str) -> None:
    relative, of_block = ERRORS[lossy]
    assert got.keys() == expected.keys()
    for key, want in expected.items():
        if key.startswith("param."):
            assert torch.equal(got[key], want.to(state_layout(lossy).param_dtype).float()), key
        elif key.startswith("master.") or not relative:
            assert torch.equal(got[key], want), key
        else:
            blocks = torch.nn.functional.pad(want.abs(), (0, -want.numel() % 256)).view(-1, 256).amax(1)
            largest = blocks.repeat_interleave(256)[: want.numel()]
            bound = want.abs() * relative * 1.001 + largest * of_block
            assert bool(((got[key] - want).abs() <= bound).all()), key


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("source", ENGINE_FORMATS)
def test_every_format_becomes_every_other(source, target, saved, tmp_path) -> None:
    path = convert(saved[source], tmp_path, state_format=target)
    assert path == tmp_path / "global_step4"
    assert read_manifest(path).state_format == target
    assert_close(values(tmp_path), values(saved[source]), target)
    assert (path / "extra.pt").read_bytes() == (saved[source] / path.name / "extra.pt").read_bytes()


@pytest.mark.parametrize("target", ENGINE_FORMATS)
@pytest.mark.parametrize("source", ENGINE_FORMATS)
def test_an_engine_loads_every_format_as_if_it_had_been_converted(source, target, saved, tmp_path) -> None:
    convert(saved[source], tmp_path / "converted", state_format=target)
    losses = []
    for directory in (saved[source], tmp_path / "converted"):
        with make_engine(Placement(), recipe(target), seed=5, build=build) as engine:
            _, client_state = engine.load_checkpoint(directory)
            assert client_state == {"format": source}
            engine.save_checkpoint(tmp_path / f"again{len(losses)}")
            losses.append(train_on(engine, batches(3, seed=2)))
    assert losses[0] == losses[1]
    direct, converted = values(tmp_path / "again0"), values(tmp_path / "again1")
    for key, value in direct.items():
        assert torch.equal(converted[key], value), key
    assert_close(direct, values(saved[source]), target)


@pytest.mark.parametrize("name", ENGINE_FORMATS)
def test_resuming_in_one_format_is_bit_for_bit(name, saved, tmp_path) -> None:
    with make_engine(Placement(), recipe(name), build=build) as engine:
        train_on(engine, batches(4))
        uninterrupted = train_on(engine, batches(4, seed=2))
    with make_engine(Placement(), recipe(name), seed=5, build=build) as engine:
        engine.load_checkpoint(saved[name])
        assert train_on(engine, batches(4, seed=2)) == uninterrupted


def test_pieces_change_no_bit(saved, tmp_path, monkeypatch) -> None:
    convert(saved["fp32"], tmp_path / "whole", state_format="int8")
    monkeypatch.setattr("infinity.checkpoint.conversion._CHUNK", 256)
    convert(saved["fp32"], tmp_path / "pieces", state_format="int8")
    assert hashes(tmp_path / "whole") == hashes(tmp_path / "pieces")


def hashes(directory: Path) -> dict[str, list[Any]]:
    path = directory / str(latest_tag(directory))
    return {key: [part.sums for part in tensor.parts] for key, tensor in read_manifest(path).tensors.items()}


def test_a_checkpoint_may_be_converted_in_place(saved, tmp_path) -> None:
    shutil.copytree(saved["split"], tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "global_step4", tmp_path / "newer")
    (tmp_path / "latest").write_text("newer")
    assert convert(tmp_path / "global_step4", tmp_path, state_format="int8") == tmp_path / "global_step4"
    assert read_manifest(tmp_path / "global_step4").state_format == "int8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step4", "latest", "newer"]
    assert latest_tag(tmp_path) == "newer"


def test_memory_is_bounded(tmp_path) -> None:
    """A process that converts 150 MB grows by the pieces in flight, not by the checkpoint."""
    model = torch.nn.Sequential(torch.nn.Linear(3500, 3500))
    with make_engine(Placement(), build=lambda _: model) as engine:
        path = engine.save_checkpoint(tmp_path)
    size = sum(p.stat().st_size for p in path.iterdir())
    script = """
import resource, sys
import torch
from infinity.checkpoint import convert

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[1], state_format="int8")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert size > 140e6
    assert int(done.stdout) < size / 2


def test_the_command_converts_and_says_so(saved, tmp_path, capsys) -> None:
    arguments = ["checkpoint", "reshard", str(saved["split"]), str(tmp_path), "--state-format", "bf16"]
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["path"] == str(tmp_path / "global_step4")
    assert 0 < record["bytes"] < sum(p.stat().st_size for p in (tmp_path / "global_step4").iterdir())
    assert record["state_format"] == "bf16"
    assert main(arguments) == 0
    assert "format bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"format": "int3"}, "state format 'int3' does not exist"), ({"source": "nowhere"}, "is no checkpoint")],
)
def test_the_command_refuses_what_cannot_work(changes, message, saved, tmp_path, capsys) -> None:
    source = tmp_path / changes["source"] if "source" in changes else saved["split"]
    state_format = changes.get("format", "int8")
    assert main(["checkpoint", "reshard", str(source), str(tmp_path / "new"), "--state-format", state_format]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_not_converted(saved, tmp_path) -> None:
    shutil.copytree(saved["split"], tmp_path / "saved")
    file = tmp_path / "saved" / "global_step4" / "unit-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(infinity.CheckpointError, match="is damaged"):
        convert(tmp_path / "saved", tmp_path / "new", state_format="int8")
    assert not (tmp_path / "new").exists()
