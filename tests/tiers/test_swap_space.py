"""Extents over several directories: the right bytes, one error that names the drive, checksums that notice."""

from __future__ import annotations

import errno
import os
import random
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch

import infinity.tiers.checksums
from infinity.config import NvmeConfig
from infinity.errors import ConfigError, StorageError
from infinity.io import IoOptions, Priority
from infinity.io.directory import allocate, open_directory
from infinity.memory import Arena
from infinity.tiers import SwapSpace, open_swap

MIB = 1 << 20
OPTIONS = IoOptions(block_size_bytes=256 << 10, queue_depth=8, threads=2)


def paths(tmp_path: Path, *names: str) -> list[NvmeConfig]:
    rates = (1e9, 2e9, 4e9)
    for name in names:
        (tmp_path / name).mkdir()
    return [NvmeConfig(tmp_path / name, bytes_per_s=rate) for name, rate in zip(names, rates, strict=False)]


@pytest.fixture
def arena():
    arena = Arena(64 * MIB)
    yield arena
    arena.close()


def flip_a_byte(space: SwapSpace, file: int, offset: int) -> None:
    with space.files()[file].open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))
        os.fsync(raw.fileno())


@pytest.mark.parametrize("backend", ["io_uring", "threads", "aiofiles"])
@pytest.mark.parametrize("checksum", [False, True])
def test_random_parts_of_striped_extents(backend, checksum, arena, tmp_path) -> None:
    space = open_swap(paths(tmp_path, "a", "b", "c"), OPTIONS, backend, checksum=checksum)
    extents = [space.reserve(size) for size in (4096, 3 * MIB, 9 * MIB + 4096)]
    space.create()
    rng = random.Random(0)
    with arena.lease(16 * MIB) as source, arena.lease(16 * MIB) as target:
        expected, found = source.tensor(torch.uint8), target.tensor(torch.uint8)
        space.register(target.span())
        for extent in extents:
            expected.random_()
            space.write(extent, source.span(0, extent.nbytes)).result()
            for _ in range(5):
                first = rng.randrange(extent.nbytes // 4096) * 4096
                nbytes = rng.randrange(4096, extent.nbytes - first + 1, 4096)
                expected[first : first + nbytes].random_()
                space.write(extent, source.span(first, nbytes), first).result()
                space.read(extent, target.span(first, nbytes), first, priority=Priority.DEMAND).result()
                assert torch.equal(expected[first : first + nbytes], found[first : first + nbytes])
            read = space.read(extent, target.span(0, extent.nbytes), priority=Priority.PREFETCH)
            assert read.result() == extent.nbytes
            assert torch.equal(expected[: extent.nbytes], found[: extent.nbytes])
    assert len({piece.file for piece in extents[-1].pieces}) == 3
    space.close()
    assert not any(list(path.iterdir()) for path in tmp_path.iterdir())


def test_a_failing_drive_names_itself(arena, tmp_path) -> None:
    space = open_swap(paths(tmp_path, "good", "bad"), OPTIONS)
    extent = space.reserve(6 * MIB)
    space.create()
    os.truncate(space.files()[1], 0)
    with arena.lease(6 * MIB) as lease, pytest.raises(StorageError, match="end of the file") as failed:
        space.read(extent, lease.span(), priority=Priority.DEMAND).result()
    assert "bad" in str(failed.value.filename)
    space.close()


def test_a_drive_that_is_too_full_names_itself_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    """Nor does it take the space that there is meanwhile, which others on the drive need."""
    allocated: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, start, nbytes: allocated.append(nbytes))
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    space = open_swap([NvmeConfig(tmp_path / "a", 4 * MIB), NvmeConfig(tmp_path / "b", 2 * free)], OPTIONS)
    space.reserve((free + free // 2) // 4096 * 4096)  # others may free some meanwhile
    with pytest.raises(StorageError, match="cannot reserve") as full:
        space.create()
    assert full.value.errno == errno.ENOSPC
    assert str(full.value.filename).endswith("/b")
    space.close()
    assert not list((tmp_path / "a").iterdir())
    assert allocated == [4 * MIB]


def test_a_limit_on_the_size_of_files_is_not_taken_for_a_full_drive(tmp_path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    space = open_swap([NvmeConfig(tmp_path)], OPTIONS)
    space.reserve(64 * MIB)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 * MIB, hard))
    try:
        with pytest.raises(StorageError, match=r"File too large.*: raise the limit on the size of files \(ulimit -f\)"):
            space.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    space.close()


def test_a_directory_that_cannot_be_looked_at_is_named(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fail)
        with pytest.raises(StorageError, match=r"\(Stale file handle\)") as failed:
            open_directory(tmp_path, "nvme path")
    assert (failed.value.errno, failed.value.filename) == (errno.ESTALE, str(tmp_path))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_space_that_a_file_has_is_not_asked_for_again(tmp_path, monkeypatch) -> None:
    drive = os.statvfs(tmp_path)
    few = SimpleNamespace(f_blocks=drive.f_blocks, f_frsize=1, f_bavail=MIB)
    with (tmp_path / "file").open("wb") as file:
        allocate(file.fileno(), 4 * MIB)
        monkeypatch.setattr(os, "fstatvfs", lambda _: few)
        allocate(file.fileno(), 5 * MIB)
        allocate(file.fileno(), MIB, 5 * MIB)
        with pytest.raises(OSError, match="No space left"):
            allocate(file.fileno(), 8 * MIB)
        few.f_blocks = 0  # a filesystem that does not say how large it is
        allocate(file.fileno(), 8 * MIB)
    assert (tmp_path / "file").stat().st_size == 8 * MIB


def test_bandwidth_is_measured_between_drives(tmp_path, caplog) -> None:
    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem")
    with caplog.at_level("INFO", "infinity.tiers.swap"):
        space = open_swap([NvmeConfig(tmp_path), NvmeConfig(other)], OPTIONS)
    rates = [record.args[1] for record in caplog.records if "GB/s" in record.msg]
    pieces = space.reserve(256 * MIB).pieces
    space.close()
    assert len(rates) == 2
    assert pieces[0].nbytes / pieces[1].nbytes == pytest.approx(rates[0] / rates[1], rel=0.05)


@pytest.mark.parametrize("file", [0, 1])
def test_a_checksum_notices_a_flipped_bit(file, arena, tmp_path) -> None:
    space = open_swap(paths(tmp_path, "a", "b"), OPTIONS, checksum=True)
    extent = space.reserve(6 * MIB)
    space.create()
    with arena.lease(6 * MIB) as lease:
        lease.tensor(torch.uint8).random_()
        space.write(extent, lease.span()).result()
        flip_a_byte(space, file, extent.pieces[file].offset + 12345)
        read = space.read(extent, lease.span(), priority=Priority.DEMAND)
        for _ in range(2):
            with pytest.raises(StorageError, match="not those that were written") as damaged:
                read.result()
        assert damaged.value.errno == errno.EBADMSG
        assert damaged.value.filename == str(space.files()[0])  # the digest is over the parts on both drives
        assert f"and in {space.files()[1]}" in str(damaged.value)
        flip_a_byte(space, file, extent.pieces[file].offset + 12345)
        again = space.read(extent, lease.span(), priority=Priority.DEMAND)
        again.result()
        lease.tensor(torch.uint8).zero_()  # whoever waited may change the memory, and others still ask
        assert again.result() == 6 * MIB
    space.close()


def test_a_check_that_was_interrupted_is_made_again(arena, tmp_path, monkeypatch) -> None:
    space = open_swap(paths(tmp_path, "a"), OPTIONS, checksum=True)
    extent = space.reserve(4096)
    space.create()
    with arena.lease(4096) as source, arena.lease(4096) as target:
        space.write(extent, source.span()).result()
        flip_a_byte(space, 0, extent.pieces[0].offset)
        read = space.read(extent, target.span(), priority=Priority.DEMAND)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(infinity.tiers.checksums, "_digest", _raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                read.result()
        with pytest.raises(StorageError, match="checksum"):
            read.result()
    space.close()


def _raise_interrupt(_: object) -> int:
    raise KeyboardInterrupt


def test_damage_is_where_it_is_in_the_file(arena, tmp_path) -> None:
    """Of an extent's second half, which lies on the second drive alone."""
    space = open_swap(
        [NvmeConfig(path.path, bytes_per_s=1e9) for path in paths(tmp_path, "a", "b")], OPTIONS, checksum=True
    )
    space.reserve(4 * MIB)
    extent = space.reserve(8 * MIB)
    space.create()
    with arena.lease(8 * MIB) as lease:
        for half in (0, 4 * MIB):
            space.write(extent, lease.span(half, 4 * MIB), half).result()
        flip_a_byte(space, 1, extent.pieces[1].offset + 12345)
        with pytest.raises(StorageError, match="not those that were written") as damaged:
            space.read(extent, lease.span(), priority=Priority.DEMAND).result()
    assert damaged.value.filename == str(space.files()[1])
    assert damaged.value.offset == extent.pieces[1].offset > 0
    space.close()


def test_checksums_without_the_package_are_refused_by_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(infinity.tiers.checksums, "xxhash", None)
    with pytest.raises(ConfigError, match="xxhash package: python -m pip install 'xxhash>="):
        open_swap(paths(tmp_path, "a"), OPTIONS, checksum=True)
