"""A damaged checkpoint is an error that names the file, never a wrong number; the engine stays as it was."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import infinity
from tests.api.small_models import flip, reseal
from tests.behaviour.reference import Placement, batches, tiny_llama, train_on
from tests.checkpoint.common import make_engine


@pytest.fixture
def saved(tmp_path) -> Path:
    with make_engine(Placement()) as engine:
        train_on(engine, batches(1))
        return engine.save_checkpoint(tmp_path, tag="good")


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
        (lambda d: flip(d / "extra.pt", 100), r"extra\.pt is damaged"),
        (lambda d: (d / "extra.pt").unlink(), r"extra\.pt cannot be read"),
        (lambda d: truncate(d / "manifest.json"), r"manifest\.json is damaged"),
        (lambda d: (d / "manifest.json").unlink(), "is no checkpoint"),
    ],
)
def test_damage_is_found_before_anything_changes(damage, message, saved) -> None:
    damage(saved)
    with unchanged_engine() as engine, pytest.raises(infinity.CheckpointError, match=message):
        engine.load_checkpoint(saved.parent)


@contextmanager
def unchanged_engine() -> Iterator[infinity.Engine]:
    """An engine with other values than any checkpoint has; see at the end that it still has them."""
    with make_engine(Placement(), seed=5) as engine:
        before = dict(engine.named_parameters())
        groups = [dict(group) for group in engine.optimizer.state_dict()["param_groups"]]
        schedule = engine.lr_scheduler.state_dict()
        random_state = torch.get_rng_state()
        yield engine
        for name, value in engine.named_parameters():
            assert torch.equal(value, before[name]), name
        assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (0, 0, 0)
        assert engine.optimizer.state_dict()["param_groups"] == groups
        assert engine.lr_scheduler.state_dict() == schedule
        assert torch.equal(torch.get_rng_state(), random_state)


def test_every_flipped_bit_of_a_manifest_is_found(saved) -> None:
    """All eight bits of bytes of every kind: digits, letters, quotes, brackets, separators, white space."""
    path = saved / "manifest.json"
    whole = path.read_bytes()
    places: dict[int, list[int]] = {}
    for position, byte in enumerate(whole):
        places.setdefault(byte, []).append(position)
    chance = random.Random(0)
    chosen = [p for found in places.values() for p in (found[0], found[-1], chance.choice(found))]
    assert {chr(whole[p]) for p in chosen} >= set('0123456789{}[]":, \n._acemrst')
    with unchanged_engine() as engine:
        for position in chosen:
            for bit in range(8):
                content = bytearray(whole)
                content[position] ^= 1 << bit
                path.write_bytes(content)
                with pytest.raises(infinity.CheckpointError, match=r"manifest\.json (is damaged|has format)"):
                    engine.load_checkpoint(saved.parent)


WTE = "master.transformer.wte.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["tensors"][WTE].update(shape=[1, 2]), "its parts do not make a tensor of shape"),
        (lambda m: m["tensors"][WTE].update(shape=[-1, -8192]), "-1 is no count"),
        (lambda m: m["tensors"][WTE].update(dtype="F64"), "format split needs master.transformer.wte.weight"),
        (lambda m: m["tensors"][WTE].update(dtype="F5"), "'F5' is no dtype"),
        (lambda m: m["tensors"][WTE].update(parts=[]), "its parts do not make a tensor"),
        (lambda m: m["tensors"][WTE].update(parts=m["tensors"][WTE]["parts"] * 2), "its parts do not make a tensor"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(start=-5), "-5 is no count"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(numel=1e999), "inf is no count"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(file="../../x"), "leaves the checkpoint"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(sums="AAAA"), "bytes length not a multiple of item size"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(sums=""), "have 0 checksums"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(sums="?"), "manifest.json is damaged"),
        (lambda m: m["tensors"][WTE]["parts"][0].update(sums=7), "manifest.json is damaged"),
        (lambda m: m["tensors"][WTE].update(m["tensors"]["exp_avg.transformer.wte.weight"]), "differ on tensor master"),
        (lambda m: m["tensors"].pop(WTE), "tensor exp_avg.transformer.wte.weight belongs to no"),
        (
            lambda m: m["tensors"].update({"master.new": m["tensors"][WTE]}),
            "format split needs exp_avg.new",
        ),
        (lambda m: m["steps"].update(stranger=3), "counts the updates of stranger"),
        (lambda m: m.update(format=99), "has format 99"),
        (lambda m: m.update(format=1), "has format 1; this version of infinity reads formats 2 and 3"),
        (lambda m: m.update(state_format="int3"), "state format 'int3' does not exist"),
        (lambda m: m.update(state_format="int8"), "format int8 needs exp_avg.transformer.*torch.uint8"),
        (lambda m: m.update(state_format="bf16"), "format bf16 needs exp_avg.transformer.*torch.bfloat16"),
        (lambda m: m.update(moments=["momentum_buffer", None]), "needs momentum_buffer"),
        (lambda m: m.update(moments=[["a"], {}]), "manifest.json is damaged"),
        (lambda m: m.pop("steps"), "manifest.json is damaged: KeyError"),
        (lambda m: m["counters"].pop("micro_steps"), "manifest.json is damaged: KeyError: 'micro_steps'"),
        (lambda m: m["counters"].update(global_steps=True), "True is no count"),
    ],
)
def test_a_manifest_is_not_trusted(change, message, saved) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    reseal(manifest, saved)
    with unchanged_engine() as engine, pytest.raises(infinity.CheckpointError, match=message):
        engine.load_checkpoint(saved.parent)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", '{"format": 2}', "", "\xff", "9" * 10_000])
def test_what_is_no_manifest_is_refused(text, saved) -> None:
    (saved / "manifest.json").write_bytes(text.encode("latin1"))
    with unchanged_engine() as engine, pytest.raises(infinity.CheckpointError, match=r"manifest\.json is damaged"):
        engine.load_checkpoint(saved.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("optimizer"), "has no `optimizer`"),
        (lambda e: e.pop("buffers"), "has no `buffers`"),
        (lambda e: e.update(client_state=None), "has no `client_state`"),
        (lambda e: e["optimizer"]["param_groups"].append({}), "has 2 parameter groups, this optimizer has 1"),
        (lambda e: e["optimizer"]["param_groups"][0].pop("eps"), "has no `eps` for parameter group 0"),
        (lambda e: e["lr_scheduler"].update(base_lrs=[]), "another LR schedule than WarmupLR"),
        (lambda e: e["buffers"].update(mask=torch.zeros(1)), "the model has no buffer mask"),
        (lambda e: e["rng"].update(torch=torch.zeros(3)), "no random state"),
        (lambda e: e["rng"].update(torch=e["rng"]["torch"].float()), "no random state"),
    ],
)
def test_what_comes_with_the_tensors_is_checked_before_anything_changes(change, message, saved) -> None:
    extra = torch.load(saved / "extra.pt", weights_only=True)
    change(extra)
    replace_extra(saved, extra)
    with unchanged_engine() as engine, pytest.raises(infinity.CheckpointError, match=message):
        engine.load_checkpoint(saved.parent)


def replace_extra(directory: Path, extra: object) -> None:
    torch.save(extra, directory / "extra.pt")
    manifest = json.loads((directory / "manifest.json").read_text())
    reseal(manifest | {"extra_crc": zlib.crc32((directory / "extra.pt").read_bytes())}, directory)


def test_a_buffer_of_another_shape_is_refused(tmp_path) -> None:
    def build(size: int) -> torch.nn.Module:
        model = tiny_llama(0)
        model.register_buffer("mask", torch.ones(size))
        return model

    with make_engine(Placement(), build=lambda _: build(3)) as engine:
        engine.save_checkpoint(tmp_path)
    with (
        make_engine(Placement(), build=lambda _: build(4)) as engine,
        pytest.raises(infinity.CheckpointError, match=r"buffer mask in shape \(3,\); the model has \(4,\)"),
    ):
        engine.load_checkpoint(tmp_path)


def test_code_in_the_extra_file_is_not_run(saved) -> None:
    replace_extra(saved, {"client_state": Path("/")})
    with unchanged_engine() as engine, pytest.raises(infinity.CheckpointError, match=r"extra\.pt cannot be loaded"):
        engine.load_checkpoint(saved.parent)


def test_another_models_checkpoint_is_refused_by_name(saved) -> None:
    with (
        make_engine(Placement(), build=tiny_llama) as engine,
        pytest.raises(infinity.CheckpointError, match=r"has no parameter model\..*: it is of another model"),
    ):
        engine.load_checkpoint(saved.parent)
