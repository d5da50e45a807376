"""Every backend moves the right bytes, or ends in one error with errno, path and offset."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.io import IoEngine, IoFuture, IoOptions, Priority, Span, open_engine, probe_backends
from infinity.io.native import NativeEngine
from infinity.memory import Arena, Lease
from infinity.memory.mapping import make_mapping
from tests import prepared
from tests.behaviour.disks import mounted
from tests.io.test_lifetimes import in_forked_child

MIB = 1 << 20
NATIVE = [status.name for status in probe_backends() if status.available and status.name != "aiofiles"]
BACKENDS = [*NATIVE, "aiofiles"]


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(128 * MIB)


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[IoEngine]:
    engine = open_engine(IoOptions(block_size_bytes=256 << 10, queue_depth=8, threads=2), request.param)
    yield engine
    engine.close()


def random_lease(arena: Arena, nbytes: int, seed: int = 0) -> Lease:
    lease = arena.lease(nbytes)
    generator = torch.Generator().manual_seed(seed)
    lease.tensor(torch.uint8).random_(generator=generator)
    return lease


@pytest.mark.parametrize("nbytes", [4096, 256 << 10, MIB + 4096, 5 * MIB])
def test_what_is_written_is_read_back(engine, arena, nbytes, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=8 * MIB)
    with random_lease(arena, nbytes) as source, arena.lease(nbytes) as target:
        assert engine.write(file, 4096, source.span()).result() == nbytes
        assert engine.read(file, 4096, target.span()).result() == nbytes
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    assert engine.stats().bytes_written == nbytes
    assert engine.stats().bytes_read == nbytes
    assert (engine.stats().writes_asked_bytes, engine.stats().reads_asked_bytes) == (nbytes, nbytes)
    file.close()


def test_a_name_that_is_not_utf8_is_opened(engine, tmp_path) -> None:
    path = tmp_path / "f\udcff"
    path.write_bytes(bytes(4096))
    engine.open(path, read_only=True).close()


def test_what_many_threads_have_asked_for_is_counted_while_it_is_under_way(engine, arena, tmp_path) -> None:
    """A total that lost one would show bytes in flight for good, or less than none."""
    threads, times = 4, 50
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    futures: list[IoFuture] = []
    with arena.lease(4096) as target:

        def ask() -> None:
            for _ in range(times):
                futures.append(engine.read(file, 0, target.span()))
                seen = engine.stats()
                assert seen.reads_asked_bytes >= seen.bytes_read

        asking = [Thread(target=ask) for _ in range(threads)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert engine.stats().reads_asked_bytes == threads * times * 4096
        for future in futures:
            future.result()
        assert engine.stats().bytes_read == threads * times * 4096
    file.close()


def test_requests_know_when_they_ran(engine, arena, tmp_path) -> None:
    """On the clock of time.perf_counter."""
    file = engine.open(tmp_path / "f", create=True, size_bytes=8 * MIB)
    with random_lease(arena, 8 * MIB) as lease:
        before_s = time.perf_counter()
        futures = [engine.write(file, 0, lease.span()) for _ in range(4)]
        for future in futures:
            times = future.times()
            assert times is None or future.done()
        for future in futures:
            future.result()
        after_s = time.perf_counter()
    stamps = [future.times() for future in futures]
    for times in stamps:
        assert before_s <= times.submitted_s <= times.started_s < times.finished_s <= after_s
    assert [times.submitted_s for times in stamps] == sorted(times.submitted_s for times in stamps)
    file.close()


@pytest.mark.parametrize("window", [5 * 4096, 640 << 10])  # shorter than a block; no multiple of one
def test_memory_is_gone_through_again_where_a_request_is_longer(window, engine, arena, tmp_path) -> None:
    """What is written says where every byte came from."""
    rest = 3 * 4096
    size = 7 * window + rest
    file = engine.open(tmp_path / "f", create=True, size_bytes=size)
    with random_lease(arena, window) as lease:
        content = bytes(lease.tensor(torch.uint8).numpy())
        assert engine.write(file, 0, lease.span(), nbytes=size).result() == size
        written = (tmp_path / "f").read_bytes()
        assert written == content * 7 + content[:rest]
        lease.tensor(torch.uint8).zero_()
        assert engine.read(file, 4096, lease.span(), nbytes=window).result() == window
        assert bytes(lease.tensor(torch.uint8).numpy()) == written[4096 : 4096 + window]
        assert engine.read(file, 0, lease.span(), nbytes=size).result() == size
    stats = engine.stats()
    assert stats.bytes_written == stats.writes_asked_bytes == size
    assert stats.bytes_read == stats.reads_asked_bytes == size + window
    file.close()


def scattered(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count).astype(np.uint64) * 4096


def test_blocks_lie_where_their_offsets_say(engine, arena, tmp_path) -> None:
    """As one request, which is longer than its memory, and without Python for each block."""
    offsets, window = scattered(300), 7
    file = engine.open(tmp_path / "f", create=True, size_bytes=300 * 4096)
    with random_lease(arena, window * 4096) as source, arena.lease(300 * 4096) as target:
        pages = source.tensor(torch.uint8).numpy().reshape(window, 4096).copy()
        future = engine.move_blocks(True, file, offsets, 4096, source.span())
        assert future.result() == 300 * 4096
        assert future.done()
        times = future.times()
        assert times.submitted_s <= times.started_s < times.finished_s
        written = np.frombuffer((tmp_path / "f").read_bytes(), dtype=np.uint8).reshape(300, 4096)
        assert (written[offsets // 4096] == pages[np.arange(300) % window]).all()
        assert engine.move_blocks(False, file, offsets, 4096, target.span()).result() == 300 * 4096
        assert (target.tensor(torch.uint8).numpy().reshape(300, 4096) == written[offsets // 4096]).all()
    stats = engine.stats()
    assert stats.bytes_written == stats.writes_asked_bytes == stats.bytes_read == stats.reads_asked_bytes == 300 * 4096
    assert engine.backend == "aiofiles" or stats.blocks == 600
    file.close()


def test_blocks_that_do_not_fit_are_refused_and_failures_named(engine, arena, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=4 * 4096)
    with arena.lease(2 * 4096) as lease:
        span = lease.span()
        with pytest.raises(StorageError, match="buffer size 8192 is not a multiple of the block size 12288"):
            engine.move_blocks(False, file, scattered(4), 12288, span)
        if file.direct:
            odd = 4096 + file.alignment // 2
            with pytest.raises(StorageError, match=f"offset {odd} is not a multiple"):
                engine.move_blocks(False, file, np.array([0, 4096, odd], np.uint64), 4096, span)
        with pytest.raises(StorageError, match="reached the end of the file") as short:
            engine.move_blocks(False, file, np.array([4096, 9 * 4096, 0], np.uint64), 4096, span).result()
        assert short.value.errno == errno.ENODATA
        assert short.value.offset == 9 * 4096
        assert engine.move_blocks(False, file, np.array([], np.uint64), 4096, span).result() == 0
    file.close()


class _Told(IoFuture):
    """A request that has its outcome, and tells whether it was waited for."""

    def __init__(self, outcome: int | StorageError) -> None:
        self.waited = False
        self._outcome = outcome

    def done(self) -> bool:
        return self.waited

    def result(self, timeout: float | None = None) -> int:
        self.waited = True
        if isinstance(self._outcome, StorageError):
            raise self._outcome
        return self._outcome

    def times(self) -> None:
        return None


def test_blocks_are_all_waited_for_also_if_one_fails(arena, tmp_path, monkeypatch) -> None:
    blocks = [_Told(4096), _Told(StorageError(errno.EIO, "bad block", "f", 4096)), _Told(4096)]
    engine = open_engine(IoOptions(), "aiofiles")
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    pending = iter(blocks)
    monkeypatch.setattr(engine, "read", lambda *_: next(pending))
    with arena.lease(4096) as target:
        read = engine.move_blocks(False, file, np.arange(3, dtype=np.uint64) * 4096, 4096, target.span())
        with pytest.raises(StorageError, match="bad block"):
            read.result()
    assert all(block.waited for block in blocks), "the memory is still in use"
    file.close()
    engine.close()


def test_a_created_file_is_private_and_must_not_exist(engine, tmp_path) -> None:
    path = tmp_path / "f"
    engine.open(path, create=True).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError) as refused:
        engine.open(path, create=True)
    assert refused.value.errno == errno.EEXIST


def test_errors_have_errno_path_and_offset(engine, arena, tmp_path) -> None:
    with pytest.raises(StorageError, match=r"missing.* at offset 0") as missing:
        engine.open(tmp_path / "missing")
    assert missing.value.errno == errno.ENOENT
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    with arena.lease(2 * MIB) as lease:
        future = engine.read(file, 0, lease.span())
        for _ in range(2):  # a result may be asked for again
            with pytest.raises(StorageError, match="reached the end of the file") as short:
                future.result()
        assert short.value.errno == errno.ENODATA
        assert short.value.filename == str(tmp_path / "f")
        assert short.value.offset == MIB
        assert isinstance(short.value, OSError)
        assert engine.read(file, 0, lease.span(0, MIB)).result() == MIB  # the engine goes on
    file.close()


def test_a_file_truncated_under_us_is_an_error(engine, arena, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=4 * MIB)
    os.truncate(tmp_path / "f", MIB)
    with arena.lease(4 * MIB) as lease, pytest.raises(StorageError, match="end of the file"):
        engine.read(file, 0, lease.span()).result()
    file.close()


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize(
    ("offset", "shift", "nbytes", "named"),
    [(100, 0, 4096, "offset 100"), (0, 0, 4000, "size 4000"), (0, 8, 4096, "buffer address")],
)
def test_unaligned_requests_are_refused_by_name(backend, offset, shift, nbytes, named, arena, tmp_path) -> None:
    engine = open_engine(IoOptions(), backend)
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    if not file.direct:
        pytest.skip("no direct I/O on this filesystem")
    with arena.lease(8192) as lease, pytest.raises(StorageError, match=f"{named}.* is not a multiple") as refused:
        engine.read(file, offset, Span(lease.address + shift, nbytes, lease))
    assert refused.value.errno == errno.EINVAL
    file.close()
    engine.close()


def test_thousands_of_small_requests_at_once(engine, arena, tmp_path) -> None:
    count = 10_000 if engine.backend != "aiofiles" else 500
    file = engine.open(tmp_path / "f", create=True, size_bytes=count * 4096)
    order = list(range(count))
    random.Random(0).shuffle(order)
    with random_lease(arena, count * 4096) as source, arena.lease(count * 4096) as target:
        for future in [engine.write(file, i * 4096, source.span(i * 4096, 4096)) for i in order]:
            future.result()
        random.Random(1).shuffle(order)
        priorities = list(Priority)
        reads = [engine.read(file, i * 4096, target.span(i * 4096, 4096), priorities[i % 3]) for i in order]
        for future in reads:
            future.result()
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    file.close()


@pytest.mark.parametrize("backend", NATIVE)
def test_waiting_for_a_prefetch_makes_it_a_demand_read(backend, arena, tmp_path) -> None:
    """In one of several tries: a busy machine may hold this thread until the reads ahead are over anyway."""
    engine = open_engine(IoOptions(block_size_bytes=4096, queue_depth=4, threads=4), backend)
    file = engine.open(tmp_path / "f", create=True, size_bytes=32 * MIB)

    def overtaken() -> int:
        """How many of 31 reads ahead are over later than the one that was asked for last and is waited for."""
        reads = [engine.read(file, i * MIB, lease.span(i * MIB, MIB), Priority.PREFETCH) for i in range(32)]
        reads[-1].result()
        for read in reads:
            read.result()
        ends_s = [read.times().finished_s for read in reads]
        return sum(end_s > ends_s[-1] for end_s in ends_s)

    with random_lease(arena, 32 * MIB) as lease:
        assert any(overtaken() > 16 for _ in range(20))
    file.close()
    engine.close()


def test_close_finishes_what_is_in_flight(engine, arena, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=16 * MIB)
    with random_lease(arena, 16 * MIB) as source:
        future = engine.write(file, 0, source.span())
        engine.close()
        assert future.done()
        assert future.result() == 16 * MIB
        assert (tmp_path / "f").read_bytes() == bytes(source.tensor(torch.uint8).numpy())
        with pytest.raises(InfinityError, match="closed"):
            engine.write(file, 0, source.span())
    engine.close()  # again does nothing
    assert not engine.register(Span(0, 4096, None)), "and nobody would answer"
    file.close()


def test_a_dropped_future_keeps_its_buffer(engine, tmp_path) -> None:
    class Owner:
        alive = 0

        def __init__(self) -> None:
            Owner.alive += 1

        def __del__(self) -> None:
            Owner.alive -= 1

    tensor = torch.zeros(4 * MIB + 4096, dtype=torch.uint8)
    address = -(-tensor.data_ptr() // 4096) * 4096
    file = engine.open(tmp_path / "f", create=True, size_bytes=4 * MIB)
    owner = Owner()
    future = engine.write(file, 0, Span(address, 4 * MIB, owner))
    del owner
    assert Owner.alive == 1
    future.result()
    del future
    engine.read(file, 0, Span(address, 4096, tensor)).result()  # a later call collects what is over
    engine.read(file, 0, Span(address, 4096, tensor)).result()
    deadline_s = time.monotonic() + 10
    while Owner.alive and time.monotonic() < deadline_s:  # a thread of aiofiles drops it after the result is known
        gc.collect()
        time.sleep(0.01)
    assert Owner.alive == 0
    file.close()


def test_a_result_can_be_waited_for_with_a_timeout(engine, arena, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=32 * MIB)
    with random_lease(arena, 32 * MIB) as source:
        future = engine.write(file, 0, source.span())
        try:
            future.result(timeout=0.0)
        except TimeoutError:
            assert future.result() == 32 * MIB
    file.close()


@pytest.mark.parametrize("backend", NATIVE)
def test_a_block_may_have_more_bytes_than_32_bits_count(backend) -> None:
    memory = make_mapping(4 << 30, 4096)
    memory.open()
    engine = open_engine(IoOptions(block_size_bytes=4 << 30), backend)
    file = engine.open("/dev/null")  # which takes them without reading them
    assert engine.write(file, 0, Span(memory.address, memory.nbytes, memory)).result() == 4 << 30
    file.close()
    engine.close()


def test_a_forked_child_gets_an_error_and_no_hang(engine, arena, tmp_path) -> None:
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    with random_lease(arena, MIB) as lease:
        assert in_forked_child(lambda: engine.read(file, 0, lease.span())) == 0
        assert engine.write(file, 0, lease.span()).result() == MIB  # the parent goes on
    file.close()


def test_requests_with_random_extents_verify(engine, arena, tmp_path) -> None:
    """Disjoint extents in random sizes, order and priority, written and read back."""
    rng = random.Random(2)
    size = (24 if engine.backend != "aiofiles" else 4) * MIB
    cuts = sorted({0, size, *(rng.randrange(size // 4096) * 4096 for _ in range(200))})
    extents = list(pairwise(cuts))
    file = engine.open(tmp_path / "f", create=True, size_bytes=size)
    with random_lease(arena, size) as source, arena.lease(size) as target:
        rng.shuffle(extents)
        for future in [engine.write(file, a, source.span(a, b - a), rng.choice(list(Priority))) for a, b in extents]:
            future.result()
        rng.shuffle(extents)
        for future in [engine.read(file, a, target.span(a, b - a), rng.choice(list(Priority))) for a, b in extents]:
            future.result()
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    file.close()


# Faults, through the engine's own seam #

GOOD_ENDINGS = [
    pytest.param({"max_transfer": 4096}, id="short-at-a-page"),
    pytest.param({"max_transfer": 512 * 9}, id="short-at-a-sector"),
    pytest.param({"max_transfer": 5000}, id="short-within-a-sector"),
    pytest.param({"interrupt_every": 2}, id="EINTR"),
    pytest.param({"again_every": 3}, id="EAGAIN"),
    pytest.param({"max_transfer": 8192, "interrupt_every": 5, "again_every": 7}, id="all"),
]


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("faults", GOOD_ENDINGS)
def test_short_and_interrupted_transfers_are_continued(backend, faults, arena, tmp_path) -> None:
    engine = NativeEngine(backend, IoOptions(64 << 10, 4, 2), faults)
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    nbytes = (320 << 10) + 4096
    with random_lease(arena, nbytes) as source, arena.lease(nbytes) as target:
        assert engine.write(file, 0, source.span()).result() == nbytes
        assert engine.read(file, 0, target.span()).result() == nbytes
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    file.close()
    engine.close()


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("faults", GOOD_ENDINGS)
def test_so_they_are_of_scattered_blocks(backend, faults, arena, tmp_path) -> None:
    engine = NativeEngine(backend, IoOptions(64 << 10, 4, 2), faults)
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    offsets = np.arange(11, dtype=np.uint64)[::-1].copy() * 12288
    nbytes = 11 * 12288
    with random_lease(arena, nbytes) as source, arena.lease(nbytes) as target:
        assert engine.move_blocks(True, file, offsets, 12288, source.span()).result() == nbytes
        assert engine.move_blocks(False, file, offsets, 12288, target.span()).result() == nbytes
        assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
    file.close()
    engine.close()


@pytest.mark.parametrize("backend", NATIVE)
def test_an_error_in_a_scattered_block_ends_its_request(backend, arena, tmp_path) -> None:
    engine = NativeEngine(backend, IoOptions(4096, 1, 1), {"error": errno.EIO, "error_at": 3})
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    offsets = np.array([9, 2, 7, 1, 0], np.uint64) * 4096
    with random_lease(arena, 4096) as source:
        with pytest.raises(StorageError, match=os.strerror(errno.EIO)) as failed:
            engine.move_blocks(True, file, offsets, 4096, source.span()).result()
        assert failed.value.offset == 7 * 4096
        assert engine.stats().blocks == 3  # the rest was not begun
        assert engine.move_blocks(True, file, offsets, 4096, source.span()).result() == 5 * 4096
    file.close()
    engine.close()


@pytest.mark.skipif("io_uring" not in NATIVE, reason="no io_uring")
def test_of_several_errors_the_first_in_the_file_is_told(arena, tmp_path) -> None:
    """The third block fails at once, and the second later: the file ends before it."""
    (tmp_path / "f").write_bytes(bytes(4096))
    engine = NativeEngine("io_uring", IoOptions(4096, 4, 1), {"error": errno.EIO, "error_at": 3})
    file = engine.open(tmp_path / "f", read_only=True)
    with arena.lease(4 * 4096) as target, pytest.raises(StorageError) as failed:
        engine.read(file, 0, target.span()).result()
    assert (failed.value.errno, failed.value.offset) == (errno.ENODATA, 4096)
    engine.close()


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_an_error_in_a_block_fails_its_request_alone(backend, code, block, arena, tmp_path) -> None:
    engine = NativeEngine(backend, IoOptions(64 << 10, 1, 1), {"error": code, "error_at": block})
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    with random_lease(arena, 8 * (64 << 10)) as source:
        first = engine.write(file, 0, source.span())
        second = engine.write(file, 0, source.span())
        with pytest.raises(StorageError, match=os.strerror(code)) as failed:
            first.result()
        assert failed.value.errno == code
        assert failed.value.offset == (block - 1) * (64 << 10)
        assert second.result() == source.nbytes
    file.close()
    engine.close()


def test_idle_threads_share_the_blocks_of_one_request(arena, tmp_path) -> None:
    """Each block is tried for 0.2 s, and the first that fails ends the request: until then, all must have begun."""
    engine = NativeEngine("threads", IoOptions(4096, 8, 8), {"again_every": 1})
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    with random_lease(arena, 8 * 4096) as target, pytest.raises(StorageError, match=os.strerror(errno.EAGAIN)):
        engine.read(file, 0, target.span(), Priority.DEMAND).result(timeout=60)
    file.close()
    engine.close()
    assert engine.stats().blocks >= 4


@pytest.mark.parametrize("backend", NATIVE)
def test_a_resource_that_never_frees_is_an_error_in_the_end(backend, arena, tmp_path) -> None:
    engine = NativeEngine(backend, IoOptions(4096, 1, 1), {"again_every": 1})
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)
    with random_lease(arena, 4096) as source, pytest.raises(StorageError) as failed:
        engine.write(file, 0, source.span()).result(timeout=60)
    assert failed.value.errno == errno.EAGAIN
    file.close()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_disk_is_one_error(backend, arena, tmp_path) -> None:
    """A real one: a small tmpfs."""
    with mounted(tmp_path / "small", "size=1m") as mount:
        engine = open_engine(IoOptions(), backend)
        with pytest.raises(StorageError) as full:
            engine.open(mount / "reserved", create=True, size_bytes=8 * MIB)
        assert full.value.errno == errno.ENOSPC
        assert not list(mount.iterdir())
        file = engine.open(mount / "grows", create=True)
        with random_lease(arena, 4 * MIB) as source, pytest.raises(StorageError) as full:
            engine.write(file, 0, source.span()).result()
        assert full.value.errno == errno.ENOSPC
        file.close()
        engine.close()


# Choice of the backend #


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose auto, io_uring, threads, aiofiles"):
        open_engine(IoOptions(), "libaio")


def test_the_probe_says_why() -> None:
    statuses = probe_backends()
    assert [s.name for s in statuses] == ["io_uring", "threads", "aiofiles"]
    assert all(s.reason for s in statuses)


_FORBIDDEN = """
import ctypes, struct, sys
sys.path.insert(0, {root!r})
libc = ctypes.CDLL(None, use_errno=True)
# seccomp: io_uring_setup (425 on every architecture) ends with EPERM, everything else is allowed
program = b"".join([
    struct.pack("HBBI", 0x20, 0, 0, 0),
    struct.pack("HBBI", 0x15, 0, 1, 425),
    struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 1),
    struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),
])
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
filter = Program(4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(filter), 0, 0) == 0
from infinity.errors import ConfigError
from infinity.io import IoOptions, open_engine, probe_backends
uring = probe_backends()[0]
assert not uring.available and "Operation not permitted" in uring.reason and "seccomp" in uring.reason, uring
engine = open_engine(IoOptions())
assert engine.backend == "threads", engine.backend
engine.close()
try:
    open_engine(IoOptions(), "io_uring")
except ConfigError as error:
    assert "does not work here" in str(error)
    print("refused")
"""


@pytest.mark.skipif("io_uring" not in NATIVE, reason="io_uring does not work here in the first place")
def test_where_io_uring_is_forbidden_threads_take_over_and_the_reason_is_told() -> None:
    """Really forbidden, by a seccomp filter in a child process."""
    script = _FORBIDDEN.format(root=str(Path(__file__).parents[2]))
    done = prepared.run(["-c", script], timeout=60)
    assert done.stdout.strip() == "refused", done.stderr


def test_a_demand_read_overtakes_queued_write_back(arena, tmp_path) -> None:
    """In one of several tries: a busy machine may hold this thread until the writes are over anyway."""
    engine = open_engine(IoOptions(block_size_bytes=64 << 10, queue_depth=4))
    file = engine.open(tmp_path / "f", create=True, size_bytes=64 * MIB)

    def overtaken() -> int:
        """How many of 8 writes are over later than the read that was asked for after them."""
        writes = [engine.write(file, i * 8 * MIB, source.span()) for i in range(8)]
        read = engine.read(file, 0, target.span(), Priority.DEMAND)
        for request in (read, *writes):
            request.result()
        return sum(write.times().finished_s > read.times().finished_s for write in writes)

    with random_lease(arena, 8 * MIB) as source, arena.lease(64 << 10) as target:
        assert any(overtaken() > 4 for _ in range(20))
    file.close()
    engine.close()
