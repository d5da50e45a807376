"""What lives how long: files closed early, forked children, locked-memory limits, polling rings, Ctrl-C."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infinity.errors import ConfigError, InfinityError, StorageError
from infinity.io import IoOptions, Span, open_engine, probe_backends
from infinity.io.aiofiles_engine import AiofilesEngine
from infinity.io.native import NativeEngine
from infinity.memory import Arena
from tests import prepared

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
NATIVE = [status.name for status in probe_backends() if status.available and status.name != "aiofiles"]
BACKENDS = [*NATIVE, "aiofiles"]
needs_uring = pytest.mark.skipif("io_uring" not in NATIVE, reason="io_uring does not work here")


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(64 * MIB)


def is_open(path: Path) -> bool:
    """Whether a process, or a ring of one, has the file open: no lease on it is granted then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_file_finishes_its_requests_and_takes_no_more(backend, arena, tmp_path) -> None:
    engine = open_engine(IoOptions(block_size_bytes=64 << 10, queue_depth=2), backend)
    file = engine.open(tmp_path / "f", create=True, size_bytes=16 * MIB)
    with arena.lease(16 * MIB) as lease:
        lease.tensor(torch.uint8).random_()
        future = engine.write(file, 0, lease.span())
        file.close()
        with pytest.raises(StorageError, match="the file is closed") as refused:
            engine.write(file, 0, lease.span())
        assert refused.value.errno == errno.EBADF
        assert future.result() == 16 * MIB
        assert (tmp_path / "f").read_bytes() == bytes(lease.tensor(torch.uint8).numpy())
    deadline = time.monotonic() + 20
    while is_open(tmp_path / "f"):  # although the future is still here
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.close()


@pytest.mark.parametrize("backend", NATIVE)
def test_many_files_come_and_go(backend, arena, tmp_path) -> None:
    """More than the ring has places for registered files, and addresses of dead ones used again."""
    engine = open_engine(IoOptions(), backend)
    with arena.lease(4096) as source, arena.lease(4096) as target:
        for number in range(200):
            file = engine.open(tmp_path / str(number), create=True, size_bytes=4096)
            source.tensor(torch.uint8).fill_(number)
            engine.write(file, 0, source.span()).result()
            engine.read(file, 0, target.span()).result()
            assert int(target.tensor(torch.uint8).max()) == number == int(target.tensor(torch.uint8).min())
            assert (tmp_path / str(number)).read_bytes() == bytes([number]) * 4096
            if number % 2:
                file.close()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_that_races_with_close_is_finished_or_refused(backend, arena, tmp_path) -> None:
    with arena.lease(4096) as lease:
        for _ in range(100):
            engine = open_engine(IoOptions(queue_depth=2, threads=2), backend)
            file = engine.open(tmp_path / "f", create=not (tmp_path / "f").exists(), size_bytes=4096)
            closer = threading.Thread(target=engine.close)
            closer.start()
            try:
                assert engine.write(file, 0, lease.span()).result(timeout=20) == 4096
            except InfinityError as error:
                assert "closed" in str(error)  # noqa: PT017
            closer.join()
            file.close()


def in_forked_child(action: Callable[[], object]) -> int:
    """0 if `action` is refused as belonging to the parent; 1 if it passes; 99 if it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
        except InfinityError as error:
            code = 0 if "parent process" in str(error) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (reaped := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return 99
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(reaped[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_cannot_wait_for_its_parents_request(backend, arena, tmp_path) -> None:
    engine = open_engine(IoOptions(block_size_bytes=4096, queue_depth=1, threads=1), backend)
    file = engine.open(tmp_path / "f", create=True, size_bytes=32 * MIB)

    def refused() -> bool:
        """Whether the last of four requests was still under way when the child asked: else it has a result there."""
        futures = [engine.write(file, 0, lease.span(0, 8 * MIB)) for _ in range(4)]
        code = in_forked_child(futures[-1].result)
        assert [future.result() for future in futures] == [8 * MIB] * 4
        assert code in (0, 1)
        return code == 0

    with arena.lease(32 * MIB) as lease:
        assert any(refused() for _ in range(20))
    file.close()
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_child_can_drop_its_parents_engine(backend, arena, tmp_path) -> None:
    engine = open_engine(IoOptions(), backend)
    file = engine.open(tmp_path / "f", create=True, size_bytes=MIB)

    def drop() -> None:
        nonlocal engine, file
        del engine, file
        gc.collect()

    with arena.lease(MIB) as lease:
        assert engine.write(file, 0, lease.span()).result() == MIB
        assert in_forked_child(drop) == 1
        assert engine.write(file, 0, lease.span()).result() == MIB  # the parent goes on
    file.close()
    engine.close()


def test_a_file_that_another_thread_closes_meanwhile_is_refused(arena, tmp_path) -> None:
    engine = AiofilesEngine(IoOptions())
    file = engine.open(tmp_path / "f", create=True, size_bytes=4096)
    opened = file.opened
    file.close()
    file.opened = opened  # as a thread sees it that looked before
    with (
        (tmp_path / "other").open("wb"),  # which may have the descriptor's number
        arena.lease(4096) as lease,
        pytest.raises(StorageError, match="the file is closed"),
    ):
        engine.write(file, 0, lease.span()).result()
    assert (tmp_path / "other").read_bytes() == b""
    engine.close()


def test_an_engine_that_another_thread_closes_meanwhile_refuses(arena, tmp_path, monkeypatch) -> None:
    engine = AiofilesEngine(IoOptions())
    file = engine.open(tmp_path / "f", create=True, size_bytes=4096)
    monkeypatch.setattr(file.opened, "hold", lambda hold=file.opened.hold: (engine.close(), hold())[1])
    with arena.lease(4096) as lease, pytest.raises(InfinityError, match="the I/O engine is closed"):
        engine.write(file, 0, lease.span())
    file.close()


@needs_uring
def test_a_forked_child_cannot_register_buffers(arena) -> None:
    engine = open_engine(IoOptions(), "io_uring")
    with arena.lease(MIB) as lease:
        assert in_forked_child(lambda: engine.register(lease.span())) == 0
    engine.close()


@needs_uring
def test_a_registered_buffer_is_kept_until_the_engine_is_closed() -> None:
    class Owner:
        alive = True

        def __del__(self) -> None:
            Owner.alive = False

    arena = Arena(MIB)
    engine = open_engine(IoOptions(), "io_uring")
    with arena.lease(MIB) as lease:
        engine.register(Span(lease.address, lease.nbytes, Owner()))
        assert Owner.alive
        engine.close()
        assert not Owner.alive


_ORDINARY = """
import ctypes, os, resource, sys
sys.path.insert(0, {root!r})
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch
from infinity.io import IoOptions, open_engine
from infinity.memory import Arena
resource.setrlimit(resource.RLIMIT_MEMLOCK, (8 << 20, 8 << 20))
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
arena = Arena(96 << 20)
engine = open_engine(IoOptions(), {backend!r})
file = engine.open({path!r}, create=True, size_bytes=32 << 20)
source, target = arena.lease(32 << 20), arena.lease(32 << 20)
source.tensor(torch.uint8).random_()
print("registered", engine.register(arena.lease(32 << 20).span()))
engine.write(file, 0, source.span()).result()
engine.read(file, 0, target.span()).result()
assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
engine.close()
print("verified")
"""


@pytest.mark.parametrize("backend", NATIVE)
def test_an_ordinary_user_with_little_locked_memory(backend, tmp_path) -> None:
    """32 MiB of buffers and a limit of 8: registration is refused and said so, the I/O works."""
    temporary = Path(tempfile.gettempdir()).resolve()
    for parent in (parent for parent in tmp_path.parents if temporary in parent.parents):  # those that pytest made
        parent.chmod(parent.stat().st_mode | 0o711)
    tmp_path.chmod(0o777)
    script = _ORDINARY.format(root=str(ROOT), backend=backend, path=str(tmp_path / "f"))
    done = prepared.run(["-c", script], timeout=60)
    assert done.stdout.split("\n")[:2] == ["registered False", "verified"], done.stderr
    assert "buffers are used unregistered" in done.stderr


@needs_uring
@pytest.mark.parametrize("mode", ["sqpoll", "iopoll"])
def test_polling_rings_work_or_say_why_not(mode, arena, tmp_path) -> None:
    try:
        engine = open_engine(IoOptions(**{mode: True}), "io_uring")
    except ConfigError as error:
        assert mode in str(error)  # noqa: PT017
        return
    file = engine.open(tmp_path / "f", create=True, size_bytes=8 * MIB)
    with arena.lease(8 * MIB) as source, arena.lease(8 * MIB) as target:
        source.tensor(torch.uint8).random_()
        try:
            engine.write(file, 0, source.span()).result(timeout=30)
            engine.read(file, 0, target.span()).result(timeout=30)
            assert torch.equal(source.tensor(torch.uint8), target.tensor(torch.uint8))
        except StorageError as error:
            assert error.errno == errno.EOPNOTSUPP  # noqa: PT017
            assert "aio.iopoll" in str(error)  # noqa: PT017
    before_s = time.process_time()
    time.sleep(0.3)
    if mode == "iopoll":
        assert time.process_time() - before_s < 0.1  # an idle ring does not spin
    file.close()
    engine.close()


_INTERRUPTED = """
import sys
sys.path.insert(0, {root!r})
from infinity.io import IoOptions
from infinity.io.aiofiles_engine import AiofilesEngine
from infinity.io.native import NativeEngine
from infinity.memory import Arena
arena = Arena(1 << 20)
engine = NativeEngine({backend!r}, IoOptions(4096, 1, 1), {{"again_every": 1}})
file = engine.open({path!r}, create=True, size_bytes=1 << 20)
futures = [engine.write(file, 0, arena.lease(4096).span()) for _ in range(100)]
try:
    print("waiting", flush=True)
    futures[-1].result()
except KeyboardInterrupt:
    print("interrupted", flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("backend", NATIVE)
def test_ctrl_c_ends_a_wait(backend, tmp_path) -> None:
    script = _INTERRUPTED.format(root=str(ROOT), backend=backend, path=str(tmp_path / "f"))
    with prepared.Child(["-c", script]) as child:
        assert child.stdout.readline() == "waiting\n"
        child.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - started_s < 5


@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.parametrize("beyond", [1, 511, 512, 4095])
def test_a_file_that_ends_between_aligned_positions_is_an_error_at_once(backend, beyond, arena, tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(8192 + beyond))
    engine = NativeEngine(backend, IoOptions())
    file = engine.open(path)
    with arena.lease(16384) as lease:
        with pytest.raises(StorageError, match="reached the end of the file") as short:
            engine.read(file, 0, lease.span()).result(timeout=10)
        assert 8192 <= (short.value.offset or 0) <= 8192 + beyond
    file.close()
    engine.close()
