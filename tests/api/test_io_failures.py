"""A drive that dies and a thread that cannot be had are errors with words, never an abort or a bare traceback."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

import infinity
from infinity.errors import InfinityError
from infinity.io import IoOptions, Span, open_engine
from infinity.io.threads import start_thread
from infinity.memory import Arena
from infinity.zero.coroutines import Coroutine
from tests import prepared
from tests.behaviour.disks import FailingDisk, swap_on
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2

ROOT = Path(__file__).parents[2]


def dying(directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[infinity.Engine, list[bool]]:
    """An engine, and a list that is no longer empty once its drive is dead: requests and removals answer EIO."""
    dead: list[bool] = []
    swap_on(monkeypatch, lambda engine: FailingDisk(engine, lambda operation, offset: bool(dead)))
    unlink = os.unlink

    def fail(*args: object, **options: object) -> None:
        if dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("infinity.tiers.swap_file.os.unlink", fail)
    config = Recipe("bf16").config(Placement("nvme", "nvme", directory, host_memory="2MiB"))
    return infinity.initialize(model=tiny_gpt2(), config=config)[0], dead


def train(engine: infinity.Engine, steps: int) -> None:
    for ids in batches(steps):
        engine.backward(loss_of(engine, ids))
        engine.step()


def test_the_error_of_a_dying_drive_is_not_lost_in_closing(tmp_path, monkeypatch, caplog) -> None:
    engine, dead = dying(tmp_path, monkeypatch)

    def lose_the_drive() -> None:
        with engine:
            train(engine, 1)
            dead.append(True)
            train(engine, 3)

    with pytest.raises(infinity.StorageError, match=r"(read|write) failed: Input/output error") as failed:
        lose_the_drive()
    assert str(tmp_path) in str(failed.value.filename)
    assert "could not be removed" in caplog.text
    assert "remove it by hand" in caplog.text
    dead.clear()
    engine.close()


def test_a_drive_that_dies_before_closing_leaves_a_warning(tmp_path, monkeypatch, caplog) -> None:
    engine, dead = dying(tmp_path, monkeypatch)
    train(engine, 1)
    engine.synchronize()
    dead.append(True)
    engine.close()
    assert "could not be removed (Input/output error)" in caplog.text


# Threads #

_SCARCE = """
import resource, sys
from pathlib import Path
import torch
from infinity import kernels
from infinity.errors import InfinityError
from infinity.io import IoOptions, open_engine
from infinity.kernels import grad_store

def leave(nbytes):  # of address space: a thread's stack takes some
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.RLIM_INFINITY))

what, mib = sys.argv[1:]
"""

_ENGINE = """
options = IoOptions(threads=8)
leave(int(mib) << 20)
try:
    open_engine(options, what).close()
except InfinityError as error:
    print(error)
"""

_KERNELS = """
source, target = torch.ones(1 << 20), torch.zeros(1 << 20)
kernels.set_threads(8)
leave(int(mib) << 20)
print(grad_store(target, source, accumulate=False).sum_sq, torch.equal(source, target))
"""


def with_little_memory(script: str, what: str, mib: int) -> str:
    done = prepared.run(["-c", _SCARCE + script, what, str(mib)])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("backend", "mib"), [("io_uring", 1), ("threads", 1), ("threads", 20), ("aiofiles", 1)])
def test_an_engine_without_threads_says_what_to_raise(backend, mib) -> None:
    """At 20 MiB some threads of eight start, which must end again."""
    said = with_little_memory(_ENGINE, backend, mib)
    assert "thread" in said
    assert "ulimit -u, or pids.max" in said


@pytest.mark.parametrize("mib", [1, 20])
def test_kernels_do_with_the_threads_that_there_are(mib) -> None:
    assert with_little_memory(_KERNELS, "", mib) == f"{float(1 << 20)} True\n"


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    start = threading.Thread.start

    def maybe(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", maybe)


def test_a_thread_that_cannot_start_is_an_error_with_words(monkeypatch) -> None:
    refuse_threads(monkeypatch, "infinity-coroutine")
    with pytest.raises(InfinityError, match=r"infinity-coroutine cannot be started \(can't start new thread\): raise"):
        Coroutine(lambda: None)
    start_thread(lambda: None, "another").join()


def test_initialize_without_a_thread_for_updates_leaves_nothing(tmp_path, monkeypatch) -> None:
    refuse_threads(monkeypatch, "infinity-update")
    config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, host_memory="2MiB"))
    with pytest.raises(InfinityError, match="infinity-update cannot be started"):
        infinity.initialize(model=tiny_gpt2(), config=config)
    assert not list(tmp_path.iterdir())


def test_the_last_backend_without_threads_for_its_requests_fails_the_request(tmp_path, monkeypatch) -> None:
    engine = open_engine(IoOptions(), "aiofiles")
    file = engine.open(tmp_path / "f", create=True, size_bytes=4096)
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: refuse_an_executor(thread, start))
    arena = Arena(4096)
    lease = arena.lease(4096)
    with pytest.raises(infinity.StorageError, match=r"read failed: can't start new thread.*ulimit -u") as failed:
        engine.read(file, 0, Span(lease.address, 4096, lease)).result(30)
    assert failed.value.errno == errno.EAGAIN
    file.close()
    engine.close()
    lease.release()
    arena.close()


def refuse_an_executor(thread: threading.Thread, start: object) -> None:
    if thread.name.startswith("asyncio"):
        raise RuntimeError("can't start new thread")
    start(thread)  # type: ignore[operator]
