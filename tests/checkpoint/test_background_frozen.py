"""Frozen parameters of saves that training does not wait for: read where they lie, at whatever pace."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import infinity
from infinity.checkpoint import frozen, latest_tag
from infinity.integrations import pretrained_model
from infinity.tiers import SameMemory
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, tiny_llama, train_on
from tests.checkpoint.common import make_engine
from tests.checkpoint.test_background import assert_same, both
from tests.checkpoint.test_convert import build


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "llama"
    tiny_llama().bfloat16().save_pretrained(path, max_shard_size="100KB")
    return path


def lora(base: Path, swap: Path, *, in_place: bool, offload: str, link: Any = None) -> infinity.Engine:
    peft = pytest.importorskip("peft")
    model, weights = pretrained_model(base, in_place=in_place)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    swap.mkdir()
    config = Recipe("bf16").config(Placement(offload, offload, swap))
    return infinity.initialize(adapted, config=config, weights=weights, link=link)[0]


HOMES = {
    "files": {"in_place": True, "offload": "nvme"},
    "drive": {"in_place": False, "offload": "nvme"},
    "memory": {"in_place": False, "offload": "cpu"},
    "device": {"in_place": True, "offload": "nvme", "link": SameMemory()},
    "device and host": {"in_place": False, "offload": "cpu", "link": SameMemory()},
}


@pytest.mark.parametrize("options", HOMES.values(), ids=HOMES)
def test_a_base_is_saved_as_by_a_save_that_waits(options, base, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(frozen, "_READ_BYTES", 12_000)  # several pieces a unit, which begin within a block
    with lora(base, tmp_path / "swap", **options) as engine:
        train_on(engine, batches(1))
        both(engine, tmp_path)
        train_on(engine, batches(2, seed=4))
        engine.wait_checkpoint()
        assert latest_tag(tmp_path / "later") == "same"
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


class Slow:
    """Frozen parameters are written when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = Event()
        write = frozen.FrozenShards._write

        def slowly(shards: frozen.FrozenShards) -> Any:
            assert self.go.wait(60)
            return write(shards)

        monkeypatch.setattr(frozen.FrozenShards, "_write", slowly)


def test_training_does_not_wait_for_what_is_frozen(tmp_path, monkeypatch) -> None:
    slow = Slow(monkeypatch)
    with make_engine(Placement("nvme", "nvme", tmp_path), build=build) as engine:
        engine.save_checkpoint(tmp_path / "waited", "same")
        path = engine.save_checkpoint(tmp_path / "later", "same", blocking=False)
        train_on(engine, batches(4))
        assert engine.saving == path
        assert latest_tag(tmp_path / "later") is None
        slow.go.set()
        shards = engine._session._background._snapshot._frozen
        shards._written.result(60)
        train_on(engine, batches(1, seed=5))
        assert engine.saving is None
        assert latest_tag(tmp_path / "later") == "same"
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


def on_ranks(path: str) -> None:
    """One rank's frozen parameters take longer: both finish when these are written."""
    directory = Path(path)
    with pytest.MonkeyPatch.context() as patch, make_engine(Placement(), build=build) as engine:
        engine.save_checkpoint(directory / "waited", "same")
        slow = Slow(patch) if engine.global_rank == 1 else None
        engine.save_checkpoint(directory / "later", "same", blocking=False)
        train_on(engine, batches(3))
        assert latest_tag(directory / "later") is None
        if slow is not None:
            slow.go.set()
            engine._session._background._snapshot._frozen._written.result(60)
        train_on(engine, batches(1, seed=5))
        assert engine.saving is None


def test_all_ranks_wait_for_the_slowest(tmp_path) -> None:
    run_ranks(2, on_ranks, str(tmp_path), path=tmp_path)
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


@pytest.mark.parametrize("ends", ["closed", "failed"])
def test_what_ends_a_run_finishes_or_removes_them(ends, tmp_path, monkeypatch, caplog) -> None:
    slow = Slow(monkeypatch)
    engine = make_engine(Placement("nvme", "nvme", tmp_path), build=build)
    engine.save_checkpoint(tmp_path / "later", "same", blocking=False)
    slow.go.set()
    if ends == "closed":
        engine.close()
        assert latest_tag(tmp_path / "later") == "same"
    else:
        del engine
        assert "is not saved: the engine was closed before it was finished" in caplog.text
        assert not (tmp_path / "later" / "same").exists()


def test_an_error_of_reading_them_is_told(base, tmp_path) -> None:
    for file in base.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with lora(tmp_path, tmp_path / "swap", in_place=True, offload="nvme") as engine:
        next(tmp_path.glob("*.safetensors")).touch()
        engine.save_checkpoint(tmp_path / "later", "same", blocking=False)
        with pytest.raises(infinity.StorageError, match=r"step 0 .* is not saved: .*weights have changed"):
            engine.wait_checkpoint()
        assert latest_tag(tmp_path / "later") is None
