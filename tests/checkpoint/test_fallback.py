"""Which checkpoint of a directory is loaded, and which are kept."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

import infinity
from infinity.checkpoint.find import find_checkpoint
from tests.api.small_models import engine_of, reseal, train


def damage(path: Path) -> None:
    file = path / "unit-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture
def saved(tmp_path) -> Path:
    """Checkpoints of steps 1 to 3."""
    with engine_of() as engine:
        for _ in range(3):
            train(engine)
            engine.save_checkpoint(tmp_path)
    for step in (1, 2, 3):
        os.utime(tmp_path / f"global_step{step}" / "manifest.json", (step, step))
    return tmp_path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    "harm",
    [damage, lambda path: (path / "manifest.json").unlink(), lambda path: (path / "extra.pt").write_bytes(b"x")],
)
def test_the_newest_whole_one_is_loaded_with_a_word_where_the_last_is_damaged(harm, saved, caplog) -> None:
    harm(saved / "global_step3")
    with engine_of(seed=5) as engine, caplog.at_level(logging.WARNING):
        path, _ = engine.load_checkpoint(saved)
        assert path == saved / "global_step2"
        assert engine.global_steps == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the checkpoint that was saved last is not whole; trying `global_step2`: ")
    assert str(saved / "global_step3") in said


def test_a_directory_without_its_file_latest_is_told_from_one_without_checkpoints(saved, caplog) -> None:
    """As if single checkpoints had been copied; the others are of no use here."""
    (saved / "latest").unlink()
    damaged: dict[str, infinity.CheckpointError] = {}
    assert find_checkpoint(saved, None, damaged) is None
    assert find_checkpoint(saved / "global_step3", None, damaged) is None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{saved} has no file `latest`")
    assert "(global_step1, global_step2, global_step3)" in first
    assert second.startswith(f"{saved}/global_step3 is a checkpoint: give the directory that it is in")
    (saved / "latest").write_bytes(b"")
    with pytest.raises(infinity.CheckpointError, match=r"latest is damaged: .*\(global_step1, global_step2, "):
        find_checkpoint(saved, None, damaged)


def test_one_that_is_asked_for_by_its_tag_is_loaded_or_refused(saved) -> None:
    damage(saved / "global_step2")
    with engine_of(seed=5) as engine:
        with pytest.raises(infinity.CheckpointError, match=r"global_step2/unit-00000\.safetensors is damaged"):
            engine.load_checkpoint(saved, tag="global_step2")
        assert engine.load_checkpoint(saved)[0] == saved / "global_step3"


def test_where_all_are_damaged_the_last_is_named(saved) -> None:
    for step in (1, 2, 3):
        damage(saved / f"global_step{step}")
    with (
        engine_of(seed=5) as engine,
        pytest.raises(infinity.CheckpointError, match=r"global_step3/unit-00000\.safetensors is damaged"),
    ):
        engine.load_checkpoint(saved)


def test_another_runs_checkpoint_and_one_of_a_later_version_are_not_taken_instead(saved) -> None:
    for step in (1, 2):
        manifest = json.loads((saved / f"global_step{step}" / "manifest.json").read_text())
        reseal(manifest | {"run": "another"}, saved / f"global_step{step}")
    damage(saved / "global_step3")
    with (
        engine_of(seed=5) as engine,
        pytest.raises(infinity.CheckpointError, match=r"global_step3/unit-00000\.safetensors is damaged"),
    ):
        engine.load_checkpoint(saved)
    manifest = json.loads((saved / "global_step3" / "manifest.json").read_text())
    reseal(manifest | {"format": 99}, saved / "global_step3")
    with engine_of(seed=5) as engine, pytest.raises(infinity.CheckpointError, match="has format 99"):
        engine.load_checkpoint(saved)


def test_the_last_ones_of_the_run_are_kept(saved) -> None:
    with engine_of(seed=1) as engine:
        engine.save_checkpoint(saved, tag="of-another-run", save_latest=False)
    with engine_of() as engine:
        engine.load_checkpoint(saved)
        train(engine)
        engine.save_checkpoint(saved, keep_last=5)  # one more than there are
        assert names(saved) == [*(f"global_step{step}" for step in range(1, 5)), "of-another-run"]
        engine.save_checkpoint(saved, keep_last=2)
        assert names(saved) == ["global_step3", "global_step4", "of-another-run"]
        engine.save_checkpoint(saved, tag="aside", save_latest=False, keep_last=1)
        assert names(saved) == ["aside", "global_step4", "of-another-run"]  # `latest` names step 4
        engine.save_checkpoint(saved, tag="best", keep_last=1)
        assert names(saved) == ["best", "of-another-run"]
        with pytest.raises(infinity.ConfigError, match="keep_last is 0; it must be at least 1"):
            engine.save_checkpoint(saved, keep_last=0)
        engine.load_checkpoint(saved)
