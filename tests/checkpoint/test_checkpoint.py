"""A run that was saved, ended and resumed is the run that never stopped; damage is an error, never a wrong number."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import infinity
from infinity.checkpoint import latest_tag
from infinity.checkpoint.directory import replacing
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, tiny_llama

RECIPE = Recipe("bf16", clipping=0.5)


def make_engine(placement: Placement, recipe: Recipe = RECIPE, *, seed: int = 0, build=tiny_gpt2) -> infinity.Engine:
    config = recipe.config(placement)
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}
    return infinity.initialize(model=build(seed), config=config)[0]


def run(engine: infinity.Engine, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in data:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


PLACEMENTS = [pytest.param(("none", "none"), id="memory"), pytest.param(("nvme", "nvme"), id="nvme")]


@pytest.mark.parametrize("saved_in", PLACEMENTS)
@pytest.mark.parametrize("resumed_in", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resuming_continues_bit_for_bit(saved_in, resumed_in, precision, tmp_path) -> None:
    recipe = Recipe(precision, clipping=0.5)
    data = batches(16)
    swap = tmp_path / "swap"
    swap.mkdir()
    with make_engine(Placement(*saved_in, swap), recipe) as engine:
        run(engine, data[:6])
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 3})
        uninterrupted = run(engine, data[6:])
    # another seed: every value must come from the checkpoint
    with make_engine(Placement(*resumed_in, swap, tile_size="64KiB"), recipe, seed=5) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "saved")
        assert path == tmp_path / "saved" / "global_step6"
        assert client_state == {"epoch": 3}
        assert engine.global_steps == 6
        assert run(engine, data[6:]) == uninterrupted


def test_frozen_parameters_are_saved(tmp_path) -> None:
    def build(seed: int) -> torch.nn.Module:
        model = tiny_llama(seed)
        model.model.embed_tokens.weight.requires_grad_(False)
        return model

    with make_engine(Placement(), build=build) as engine:
        engine.save_checkpoint(tmp_path)
        saved = dict(engine.named_parameters())
    with make_engine(Placement(), build=build, seed=5) as engine:
        engine.load_checkpoint(tmp_path)
        for name, value in engine.named_parameters():
            assert torch.equal(value, saved[name]), name


def test_any_tool_can_open_the_tensors(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        run(engine, batches(2))
        path = engine.save_checkpoint(tmp_path, tag="two")
        weights = dict(engine.named_parameters())
    seen = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                field, _, name = key.partition(".")
                if field == "master":
                    seen.add(name)
                    master = tensors.get_tensor(key)
                    tie = master.view(torch.int32) & 0xFFFF == 0x8000  # `split` rounds these away from zero
                    assert torch.equal(master.bfloat16()[~tie], weights[name][~tie])
    assert seen == weights.keys()


def test_an_empty_directory_has_no_checkpoint(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        assert engine.load_checkpoint(tmp_path) == (None, None)
        with pytest.raises(infinity.CheckpointError, match="is no checkpoint"):
            engine.load_checkpoint(tmp_path, tag="missing")


def test_the_last_saved_one_is_loaded_and_an_older_one_by_its_tag(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        engine.save_checkpoint(tmp_path)
        run(engine, batches(2))
        engine.save_checkpoint(tmp_path)
        assert latest_tag(tmp_path) == "global_step2"
        engine.load_checkpoint(tmp_path, tag="global_step0")
        assert engine.global_steps == 0
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


# Damage #


@pytest.fixture
def saved(tmp_path) -> Path:
    with make_engine(Placement()) as engine:
        run(engine, batches(1))
        return engine.save_checkpoint(tmp_path, tag="good")


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: flip(d / "unit-00001.safetensors", -1), r"unit-00001\.safetensors is damaged: tensor exp_avg_sq\."),
        (lambda d: flip(d / "unit-00001.safetensors", 3), r"unit-00001\.safetensors is damaged: its header"),
        (lambda d: flip(d / "unit-00001.safetensors", 12), r"unit-00001\.safetensors is damaged"),
        (lambda d: truncate(d / "unit-00002.safetensors"), r"unit-00002\.safetensors is truncated"),
        (lambda d: (d / "unit-00000.safetensors").unlink(), r"unit-00000\.safetensors cannot be read"),
        (lambda d: flip(d / "extra.pt", 100), r"extra\.pt is missing or damaged"),
        (lambda d: truncate(d / "manifest.json"), r"manifest\.json is damaged"),
        (lambda d: (d / "manifest.json").unlink(), "is no checkpoint"),
    ],
)
def test_damage_is_found_before_anything_changes(damage, message, saved) -> None:
    damage(saved)
    with make_engine(Placement(), seed=5) as engine:
        before = dict(engine.named_parameters())
        with pytest.raises(infinity.CheckpointError, match=message):
            engine.load_checkpoint(saved.parent)
        for name, value in engine.named_parameters():
            assert torch.equal(value, before[name])
        assert engine.global_steps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["tensors"]["master.transformer.wte.weight"].update(shape=[1, 2]), "manifest.json is damaged"),
        (lambda m: m["tensors"]["master.transformer.wte.weight"].update(file="../../x"), "leaves the checkpoint"),
        (lambda m: m["tensors"].pop("master.transformer.wte.weight"), "has no tensor master.transformer.wte.weight"),
        (lambda m: m.update(format=99), "has format 99"),
        (lambda m: m.pop("steps"), "manifest.json is damaged: KeyError"),
    ],
)
def test_a_manifest_is_not_trusted(change, message, saved) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with make_engine(Placement()) as engine, pytest.raises(infinity.CheckpointError, match=message):
        engine.load_checkpoint(saved.parent)


def test_another_models_checkpoint_is_refused_by_name(saved) -> None:
    with (
        make_engine(Placement(), build=tiny_llama) as engine,
        pytest.raises(infinity.CheckpointError, match="no tensor"),
    ):
        engine.load_checkpoint(saved.parent)


def test_client_state_with_code_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine, pytest.raises(infinity.CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, client_state={"path": Path("/")})
    assert not list(tmp_path.iterdir())


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path) -> None:
    with make_engine(Placement(), Recipe(accumulation=2)) as engine:
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
        with pytest.raises(infinity.InfinityError, match="middle of a step"):
            engine.save_checkpoint(tmp_path)


# Interruption #


def fill(target: Path, content: str) -> None:
    (target / "file").write_text(content)


def fill_the_disk(directory: Path) -> None:
    with replacing(directory, "tag") as target:
        fill(target, "half")
        raise OSError(errno.ENOSPC, "full")


def test_a_failed_save_leaves_the_old_one(tmp_path) -> None:
    with replacing(tmp_path, "tag") as target:
        fill(target, "old")
    with pytest.raises(infinity.StorageError, match=r"No space left.*free some space") as full:
        fill_the_disk(tmp_path)
    assert full.value.errno == errno.ENOSPC
    assert (tmp_path / "tag" / "file").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "tag"]


@pytest.mark.parametrize("call", range(1, 12))
def test_a_save_killed_anywhere_leaves_a_whole_checkpoint(call, tmp_path) -> None:
    """The process dies at its n-th rename, fsync or removal."""
    script = """
import os, shutil, signal, sys
from pathlib import Path
from infinity.checkpoint.directory import replacing

directory, fatal = Path(sys.argv[1]), int(sys.argv[2])
count = 0

def audit(event, args):
    global count
    if armed and event in ("os.rename", "shutil.rmtree", "open", "os.mkdir", "os.remove"):
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

armed = False
sys.addaudithook(audit)
with replacing(directory, "tag") as target:
    (target / "file").write_text("old")
armed = True
with replacing(directory, "tag") as target:
    (target / "file").write_text("new")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path), str(call)], check=False, timeout=60)
    with replacing(tmp_path, "other") as target:  # the next save cleans up
        fill(target, "other")
    assert (tmp_path / "tag" / "file").read_text() in ("old", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "other", "tag"]


def test_a_tag_that_leads_elsewhere_is_refused(tmp_path) -> None:
    with make_engine(Placement()) as engine:
        for tag in ("../up", "a/b", ".hidden", "latest"):
            with pytest.raises(infinity.ConfigError, match="plain directory name"):
                engine.save_checkpoint(tmp_path, tag=tag)
