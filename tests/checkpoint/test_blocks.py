"""What is written in ranges of any size and place is what the file holds, with direct I/O and without."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from infinity.checkpoint import blocks
from infinity.checkpoint.blocks import OutputFile, Staging
from infinity.errors import InfinityError
from infinity.io import IoOptions
from infinity.io.native import NativeEngine
from infinity.memory import ALIGN_BYTES


@pytest.fixture(params=["drive", "memory"])
def directory(request, tmp_path) -> Path:
    """On a drive with direct I/O, and on a filesystem in memory that may have none."""
    return tmp_path if request.param == "drive" else Path(request.getfixturevalue("in_memory"))


@pytest.fixture
def in_memory(tmp_path_factory) -> Path:
    path = Path("/dev/shm")
    if not os.access(path, os.W_OK):
        pytest.skip("no filesystem in memory")
    return path


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_lands_where_it_belongs(seed, directory) -> None:
    chance = random.Random(seed)
    path = directory / f"infinity-test-{os.getpid()}"
    content = chance.randbytes(chance.choice((0, 1, ALIGN_BYTES, 9 << 20, (10 << 20) + 77)))
    sizes = (1, 13, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1, 3 * ALIGN_BYTES, (4 << 20) + 5, 9 << 20)
    ranges = []
    offset = 0
    while offset < len(content):
        size = min(chance.choice(sizes), len(content) - offset)
        ranges.append((offset, size))
        offset += size
    chance.shuffle(ranges)
    try:
        with Staging() as staging:
            file = OutputFile(path, len(content), staging)
            for offset, size in ranges:
                data = bytearray(content[offset : offset + size])
                file.write(memoryview(data), offset)
                data[:] = bytes(size)  # may be reused at once
            file.finish()
        assert path.read_bytes() == content
    finally:
        path.unlink()


def test_files_share_staging_memory(tmp_path) -> None:
    contents = [random.Random(n).randbytes((5 << 20) + n) for n in range(4)]
    with Staging() as staging:
        files = [OutputFile(tmp_path / str(n), len(content), staging) for n, content in enumerate(contents)]
        for start in range(0, 6 << 20, 1 << 20):
            for file, content in zip(files, contents, strict=True):
                file.write(memoryview(content)[start : start + (1 << 20)], start)
        for file in files:
            file.finish()
    for n, content in enumerate(contents):
        assert (tmp_path / str(n)).read_bytes() == content


def test_a_file_that_does_not_fit_is_refused_at_once_and_takes_no_space(small_disk) -> None:
    before = descriptors()
    with Staging() as staging, pytest.raises(OSError, match="No space left"):
        OutputFile(small_disk / "large", 4 << 20, staging)
    assert descriptors() == before
    assert not list(small_disk.iterdir())
    (small_disk / "other").write_bytes(bytes(2 << 20))


def test_an_abandoned_file_leaves_no_descriptor(tmp_path) -> None:
    before = descriptors()
    with Staging() as staging:
        file = OutputFile(tmp_path / "file", 5 << 20, staging)
        file.write(memoryview(bytes(5 << 20)), 0)
        file.close()
        file.close()
    assert descriptors() == before


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_what_direct_io_refuses_goes_through_the_cache(backend, tmp_path, monkeypatch) -> None:
    content = random.Random(1).randbytes((24 << 20) + 5)
    with Staging() as staging:
        _fail(staging, backend, errno.EINVAL, monkeypatch)
        file = OutputFile(tmp_path / "file", len(content), staging)
        file.write(memoryview(content), 0)
        file.finish()
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_write_that_fails_is_told_at_the_end_of_its_file_alone(backend, tmp_path, monkeypatch) -> None:
    content = random.Random(1).randbytes(24 << 20)
    with Staging() as staging:
        _fail(staging, backend, errno.EIO, monkeypatch)
        files = [OutputFile(tmp_path / name, len(content), staging) for name in ("broken", "whole")]
        for file in files:
            file.write(memoryview(content), 0)
        with pytest.raises(OSError, match="Input/output error"):
            files[0].finish()
        files[1].finish()
    assert (tmp_path / "whole").read_bytes() == content


def _fail(staging: Staging, backend: str, error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One write of the first file that is begun ends so."""
    staging._engine.close()
    engine = NativeEngine(backend, IoOptions(queue_depth=4, threads=2), {"error": error, "error_at": 3})
    monkeypatch.setattr(staging, "_engine", engine)


def test_without_an_engine_everything_goes_through_the_cache(tmp_path, monkeypatch) -> None:
    def refuse(options: IoOptions) -> None:
        raise InfinityError("no thread")

    monkeypatch.setattr(blocks, "open_engine", refuse)
    content = random.Random(2).randbytes((5 << 20) + 3)
    with Staging() as staging:
        file = OutputFile(tmp_path / "file", len(content), staging)
        file.write(memoryview(content), 0)
        file.finish()
    assert (tmp_path / "file").read_bytes() == content
