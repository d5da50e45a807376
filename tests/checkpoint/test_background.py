"""Saves that training does not wait for: the state of their moment, whatever comes after, or an error in words."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import infinity
from infinity.checkpoint import latest_tag
from infinity.checkpoint.blocks import OutputFile
from infinity.checkpoint.format import read_manifest
from infinity.checkpoint.inspection import verify
from infinity.checkpoint.stored import StoredReader
from tests import prepared
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, train_on
from tests.checkpoint.common import make_engine
from tests.checkpoint.test_convert import build

TILED = Placement(tile_size="64KiB")


def stored(path: Path) -> dict[str, torch.Tensor]:
    _, manifest = verify(path)
    with StoredReader(path, manifest.tensors) as reader:
        return {key: reader.read(key, 0, tensor.numel) for key, tensor in manifest.tensors.items()}


def assert_same(path: Path, expected: Path) -> None:
    """Two checkpoints say the same of one step."""
    found, wanted = stored(path), stored(expected)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    first, second = read_manifest(path), read_manifest(expected)
    assert (first.steps, first.counters) == (second.steps, second.counters)


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def both(engine: infinity.Engine, directory: Path) -> None:
    """The state of now, waited for and not."""
    engine.save_checkpoint(directory / "waited", "same")
    engine.save_checkpoint(directory / "later", "same", blocking=False)
    assert latest_tag(directory / "later") is None
    saving, until_s = engine._session._background, time.monotonic() + 60
    assert saving is not None
    while saving._snapshot.waits_for_frozen:  # by a thread that a busy machine may hold up for two steps
        assert time.monotonic() < until_s
        time.sleep(0.01)


@pytest.mark.parametrize("schedule", ["deferred", "barrier", "backward"])
@pytest.mark.parametrize("home", ["none", "nvme"])
def test_it_is_the_state_of_its_moment(home, schedule, tmp_path) -> None:
    placement = Placement(home, home, tmp_path, tile_size="64KiB", schedule=schedule)
    recipe = Recipe("bf16", clipping=0.0 if schedule == "backward" else 0.5)
    with make_engine(placement, recipe, build=build) as engine:
        train_on(engine, batches(2))
        both(engine, tmp_path)
        train_on(engine, batches(1, seed=4))
        assert latest_tag(tmp_path / "later") is None
        train_on(engine, batches(1, seed=5))
        assert latest_tag(tmp_path / "later") == "same"
        after = train_on(engine, batches(2, seed=6))
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")
    with make_engine(placement, recipe, build=build) as engine:
        train_on(engine, [*batches(2), *batches(1, seed=4), *batches(1, seed=5)])
        assert train_on(engine, batches(2, seed=6)) == after


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_precision(precision, tmp_path) -> None:
    with make_engine(TILED, Recipe(precision), build=build) as engine:
        train_on(engine, batches(2))
        both(engine, tmp_path)
        train_on(engine, batches(2, seed=4))
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


def _wait(engine: infinity.Engine, path: Path) -> None:
    engine.wait_checkpoint()


def _save(engine: infinity.Engine, path: Path) -> None:
    engine.save_checkpoint(path, "other", blocking=False)


def _load(engine: infinity.Engine, path: Path) -> None:
    engine.load_checkpoint(path / "waited")


def _change(engine: infinity.Engine, path: Path) -> None:
    with infinity.zero.GatheredParameters(engine.module, modifier_rank=0), torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()


def _close(engine: infinity.Engine, path: Path) -> None:
    engine.close()


@pytest.mark.parametrize("call", [_wait, _save, _load, _change, _close])
@pytest.mark.parametrize("steps", [0, 1])
def test_what_comes_next_waits_for_it(call: Callable[..., None], steps, tmp_path) -> None:
    with make_engine(TILED, build=build) as engine:
        train_on(engine, batches(2))
        both(engine, tmp_path)
        train_on(engine, batches(steps, seed=4))
        call(engine, tmp_path)
        assert latest_tag(tmp_path / "later") == "same"
        assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


def test_steps_that_are_skipped_change_nothing(tmp_path) -> None:
    with make_engine(TILED, Recipe("fp16"), build=build) as engine:
        train_on(engine, batches(2))
        both(engine, tmp_path)
        for ids in batches(2, seed=4):
            engine.backward(engine(input_ids=ids, labels=ids).loss * float("inf"))
            engine.step()
        assert engine.skipped_steps == 2
        engine.wait_checkpoint()  # on a busy machine it may still be written
        assert latest_tag(tmp_path / "later") == "same"
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")


def test_parameters_that_are_written_by_hand_meanwhile_are_noticed(tmp_path) -> None:
    with make_engine(Placement(), Recipe(extra={"zero_optimization": {"stage": 1}})) as engine:
        train_on(engine, batches(1))
        engine.save_checkpoint(tmp_path, blocking=False)
        with torch.no_grad():
            next(iter(engine.module.parameters())).mul_(0.5)
        train_on(engine, batches(1))
        with pytest.raises(infinity.CheckpointError, match=r"step 1 .* is not saved: .* written by the training loop"):
            engine.wait_checkpoint()
        assert not (tmp_path / "global_step1").exists()
        engine.save_checkpoint(tmp_path)
        train_on(engine, batches(1))


@pytest.mark.parametrize("call", [_wait, _close])
def test_an_error_of_writing_is_raised_at_the_next_call(call, tmp_path, monkeypatch) -> None:
    with make_engine(TILED) as engine:
        train_on(engine, batches(1))
        engine.save_checkpoint(tmp_path, "before")
        engine.save_checkpoint(tmp_path, "lost", blocking=False)

        with monkeypatch.context() as broken:
            broken.setattr(OutputFile, "write", _full)
            train_on(engine, batches(1))
            engine.synchronize()
        with pytest.raises(infinity.StorageError, match=r"step 1 .* is not saved: .*free some space"):
            call(engine, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".run")) == [
            "before",
            "latest",
        ]
        if call is _wait:
            train_on(engine, batches(1))
            engine.save_checkpoint(tmp_path, "after")


@pytest.mark.parametrize("call", [_wait, _save, _change, _close])
def test_a_save_that_fails_under_step_leaves_the_loop_alone(call, tmp_path, monkeypatch, caplog) -> None:
    """A loop that runs a step again when `step()` raises would train its batch twice."""
    with make_engine(TILED) as engine:
        losses = train_on(engine, batches(4))
    with make_engine(TILED) as engine:
        found = train_on(engine, batches(4)[:1])
        engine.save_checkpoint(tmp_path, "lost", blocking=False)
        with monkeypatch.context() as broken:
            broken.setattr(OutputFile, "write", _full)
            found += train_on(engine, batches(4)[1:])
        assert (found, engine.global_steps) == (losses, 4)
        assert "step 1" in caplog.text
        assert "is not saved" in caplog.text
        with pytest.raises(infinity.StorageError, match=r"step 1 .* is not saved: .*free some space"):
            call(engine, tmp_path)
        if call is not _close:
            engine.wait_checkpoint()  # it is raised once
            assert engine.save_checkpoint(tmp_path, "after").is_dir()


def test_an_engine_that_nobody_closes_leaves_nothing_half(tmp_path, caplog) -> None:
    engine = make_engine(TILED)
    train_on(engine, batches(1))
    engine.save_checkpoint(tmp_path, blocking=False)
    del engine
    assert "is not saved: the engine was closed before it was finished" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == []


_PROCESS = """
import sys
from tests.behaviour.reference import Placement, batches
from tests.behaviour.reference import train_on
from tests.checkpoint.common import make_engine

engine = make_engine(Placement())
train_on(engine, batches(2))
engine.save_checkpoint(sys.argv[1], blocking=False)
train_on(engine, batches(1))
raise ValueError("an end")
"""


def test_the_end_of_the_process_waits_for_it(tmp_path) -> None:
    done = prepared.run(["-c", _PROCESS, tmp_path], clears=True)
    assert "ValueError: an end" in done.stderr
    assert verify(tmp_path)[1].counters["global_steps"] == 2


def save_on_ranks(path: str) -> str:
    """Save twice, the second time where the drive of one rank is full; what that rank says."""
    later = Path(path) / "later"
    with make_engine(TILED, build=build) as engine:
        train_on(engine, batches(2))
        both(engine, Path(path))
        train_on(engine, batches(2, seed=4))
        assert latest_tag(later) == "same"
        engine.save_checkpoint(later, "lost", blocking=False)
        with pytest.MonkeyPatch.context() as broken:
            if dist.get_rank() == 1:
                broken.setattr(OutputFile, "write", _full)
            train_on(engine, batches(1))
            engine.synchronize()
        with pytest.raises(infinity.InfinityError, match=r"step 4 .* is not saved") as raised:
            engine.wait_checkpoint()
        train_on(engine, batches(1))
        return str(raised.value)


def test_on_two_ranks(tmp_path) -> None:
    first, second = run_ranks(2, save_on_ranks, str(tmp_path), path=tmp_path)
    assert "rank 1: " in first
    assert "No space left on device" in second
    assert latest_tag(tmp_path / "later") == "same"
    assert not (tmp_path / "later" / "lost").exists()
    assert_same(tmp_path / "later" / "same", tmp_path / "waited" / "same")
    assert read_manifest(tmp_path / "later" / "same").ranks == 2
