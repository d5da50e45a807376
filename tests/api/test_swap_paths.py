"""The directories of swap files: made when missing, and nothing that others put there is followed or waited for."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.config import NvmeConfig
from infinity.io import IoEngine, IoFile, IoOptions, Priority, open_engine
from infinity.memory import Arena
from infinity.tiers import ActivationFiles, SwapSpace, open_swap
from infinity.tiers.swap_file import create_owned, remove_stale
from tests.behaviour.disks import Disk, swap_on
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2

MIB = 1 << 20
RECIPE = Recipe("bf16")
OPTIONS = IoOptions(block_size_bytes=256 << 10, queue_depth=8, threads=2)


def train_one_step(directory: Path) -> None:
    config = RECIPE.config(Placement("nvme", "nvme", directory, host_memory="2MiB"))
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        assert list(directory.glob("infinity-*.swap"))
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()


def new_space(directory: Path, backend: str = "auto") -> SwapSpace:
    space = open_swap([NvmeConfig(directory)], OPTIONS, backend)
    space.reserve(MIB)
    return space


# Missing directories #


def test_a_missing_directory_is_made_for_this_user_alone(tmp_path) -> None:
    directory = tmp_path / "drive" / "run"
    train_one_step(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not list(directory.iterdir())


def test_a_missing_directory_for_activations_is_made(tmp_path) -> None:
    directory = tmp_path / "drive"
    files = ActivationFiles(open_engine(OPTIONS), [directory], 0, checksum=False)
    files.take(4096)
    assert len(list(directory.iterdir())) == 1
    files.close()


def test_a_missing_directory_of_the_optimizer_is_made(tmp_path) -> None:
    model = nn.Linear(4, 4)
    optimizer = infinity.optim.AdamW(model.parameters(), offload="nvme", nvme_path=tmp_path / "drive")
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.close()
    assert not list((tmp_path / "drive").iterdir())


@pytest.mark.parametrize(
    ("below", "code"), [("file", errno.EEXIST), ("file/below", errno.ENOTDIR), ("loop/below", errno.ELOOP)]
)
def test_a_directory_that_cannot_be_made_is_named(below, code, tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path / below))
    with pytest.raises(
        infinity.StorageError, match=rf"cannot use this nvme path, nor create it .*{below}'$"
    ) as refused:
        infinity.initialize(model=tiny_gpt2(), config=config)
    assert refused.value.errno == code


# Directories that others write to #


def test_a_directory_where_everybody_may_rename_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(infinity.StorageError, match=r"no sticky bit.*chmod o-w or chmod \+t") as refused:
        train_one_step(tmp_path)
    assert refused.value.filename == str(tmp_path)


@pytest.mark.parametrize("below", ["", "own"])
def test_a_sticky_directory_and_an_own_one_below_an_open_one_are_taken(below, tmp_path) -> None:
    tmp_path.chmod(0o1777 if below == "" else 0o777)
    train_one_step(tmp_path / below)


def put_a_link_in_its_place(file: Path, target: Path) -> None:
    file.unlink()
    file.symlink_to(target)


@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
def test_a_link_in_the_place_of_a_swap_file_is_not_written_through(backend, tmp_path, monkeypatch) -> None:
    """Before the engine opens the file, and once more while it is in use."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * (MIB // 8))

    class Attacked(Disk):
        def open(self, path: str | Path, **options: object) -> IoFile:
            put_a_link_in_its_place(Path(path), victim)
            return super().open(path, **options)  # type: ignore[arg-type]

    swap_on(monkeypatch, Attacked)
    directory = tmp_path / "drive"
    space = open_swap([NvmeConfig(directory)], OPTIONS, backend)
    extent = space.reserve(MIB)
    space.create()
    put_a_link_in_its_place(space.files()[0], victim)
    arena = Arena(2 * MIB)
    with arena.lease(MIB) as source, arena.lease(MIB) as target:
        source.tensor(torch.uint8).random_()
        assert space.write(extent, source.span()).result() == MIB
        assert space.read(extent, target.span(), priority=Priority.DEMAND).result() == MIB
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    space.close()
    arena.close()
    assert victim.read_bytes() == b"precious" * (MIB // 8)
    assert not list(directory.iterdir())


def test_a_link_in_the_place_of_an_activation_file_is_not_written_through(tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    engine: IoEngine = open_engine(OPTIONS)
    files = ActivationFiles(engine, [tmp_path / "drive"], 0, checksum=False)
    (file,) = (tmp_path / "drive").iterdir()
    put_a_link_in_its_place(file, victim)
    files.take(4096)
    files.close()
    assert victim.stat().st_size == 0


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_was_planted_under_a_swap_files_name_is_left_alone(kind, tmp_path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    planted = tmp_path / "drive" / "infinity-r0-1-0.swap"
    planted.parent.mkdir()
    {"link": lambda: planted.symlink_to(target), "pipe": lambda: os.mkfifo(planted), "directory": planted.mkdir}[kind]()
    assert remove_stale(planted.parent) == []
    assert target.read_text() == "precious"
    assert os.path.lexists(planted)


# Locks #


_HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        yield
        holder.kill()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", ["", "infinity-r0-1-0.swap"])
def test_a_lock_of_somebody_else_makes_nobody_wait(what, tmp_path) -> None:
    dead = tmp_path / "infinity-r0-1-0.swap"
    dead.touch()
    with locked_by_another(tmp_path / what):
        space = new_space(tmp_path)
        space.create()
        space.close()
    assert dead.exists() == (what != "")  # its owner seems to live


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.ENOLCK])
def test_without_locks_there_is_one_warning_and_nothing_of_others_is_removed(
    code, tmp_path, monkeypatch, caplog
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("infinity.tiers.swap_file.fcntl.flock", refuse)
    other = tmp_path / "infinity-r0-1-0.swap"
    other.touch()
    spaces = [new_space(tmp_path) for _ in range(2)]
    for space in spaces:
        space.create()
    for space in spaces:
        space.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "cannot be locked here" in warnings[0]
    assert list(tmp_path.iterdir()) == [other]


def test_a_run_that_died_before_its_file_had_its_name_is_cleaned_up(tmp_path) -> None:
    fresh, old = (tmp_path / f"infinity-r0-{pid}-0.swap.new" for pid in (1, 2))
    for path in (fresh, old):
        path.touch()
    os.utime(old, (0, 0))
    assert remove_stale(tmp_path) == [old]
    assert fresh.exists()


def test_starting_runs_do_not_take_each_others_files_for_dead(tmp_path) -> None:
    owned = [create_owned(tmp_path, rank, 0) for rank in range(4)]
    assert remove_stale(tmp_path) == []
    for file in owned:
        assert file.path.exists()
        file.remove()
