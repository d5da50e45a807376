"""A checkpoint appears whole or not at all, whatever ends the process."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest

import infinity
from infinity.checkpoint.directory import latest_tag, locked, replacing, restore_interrupted, writing
from infinity.checkpoint.find import find_checkpoint
from infinity.io.directory import make_lasting
from tests import prepared


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
    too_large = r"; raise the limit on the size of files \(ulimit -f\) or save elsewhere"
    with pytest.raises(infinity.StorageError, match=too_large), writing(tmp_path):
        raise OSError(errno.EFBIG, "too large")


def fail(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EIO, "the drive has gone")


def test_a_drive_that_fails_for_good_does_not_hide_why_a_save_failed(tmp_path, monkeypatch) -> None:
    def save() -> None:
        with replacing(tmp_path, "tag"):
            monkeypatch.setattr(Path, "glob", fail)
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(infinity.StorageError, match="No space left"):
        save()


@pytest.mark.parametrize(("cls", "name"), [(os, "fstat"), (Path, "glob"), (Path, "is_dir")])
def test_a_drive_that_fails_is_told_in_words_by_a_load(cls, name, tmp_path, monkeypatch) -> None:
    with replacing(tmp_path, "tag") as target:
        fill(target, "no manifest")

    def load() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(cls, name, fail)
            restore_interrupted(tmp_path)
            find_checkpoint(tmp_path, None, {})

    with pytest.raises(infinity.CheckpointError, match=f"{tmp_path}.*(the drive has gone|No such file)"):
        load()


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
    (target / "manifest.json").write_text("old")
armed = True
with replacing(directory, "tag") as target:
    (target / "manifest.json").write_text("new")
"""
    prepared.run(["-c", script, tmp_path, str(call)], timeout=60)
    restore_interrupted(tmp_path)  # as a load does
    assert latest_tag(tmp_path) == "tag"
    assert (tmp_path / "tag" / "manifest.json").read_text() in ("old", "new")
    with replacing(tmp_path, "other") as target:  # the next save cleans up
        fill(target, "other")
    assert (tmp_path / "tag" / "manifest.json").read_text() in ("old", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "other", "tag"]


def test_the_names_of_all_new_directories_are_flushed(tmp_path, monkeypatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr("infinity.io.directory.sync_directory", flushed.append)
    make_lasting(tmp_path / "a" / "b" / "c")
    assert flushed == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_tag_may_be_called_as_it_likes(tmp_path) -> None:
    for tag in ("old-tag", "tag", "new-tag", "old-old-tag"):
        for content in ("first", "second"):
            with replacing(tmp_path, tag) as target:
                fill(target, content)
    restore_interrupted(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "new-tag", "old-old-tag", "old-tag", "tag"]
    assert {(p / "file").read_text() for p in tmp_path.iterdir() if p.is_dir()} == {"second"}


def test_a_second_saver_is_refused_and_a_reader_leaves_it_alone(tmp_path) -> None:
    with replacing(tmp_path, "tag") as target:
        fill(target, "old")
    with replacing(tmp_path, "tag") as target:
        fill(target, "new")
        (tmp_path / "tag").rename(tmp_path / ".tmp-old-tag")  # between the two renames
        restore_interrupted(tmp_path)
        assert not (tmp_path / "tag").exists()
        with pytest.raises(infinity.CheckpointError, match="another process is saving"), replacing(tmp_path, "other"):
            pass
        (tmp_path / ".tmp-old-tag").rename(tmp_path / "tag")
    assert (tmp_path / "tag" / "file").read_text() == "new"


def test_a_child_does_not_keep_the_lock_of_a_save(tmp_path) -> None:
    """As the workers of a data loader that is started while a checkpoint is written in the background."""
    with locked(tmp_path) as alone:
        assert alone
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with locked(tmp_path) as alone:
            assert alone
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
