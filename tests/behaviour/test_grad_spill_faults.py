"""Drives that fail under spilled gradients: a clear error, a clean end, never a wrong number, never a hang."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import infinity
from infinity.config import load_config
from infinity.io.native import NativeEngine
from infinity.planner import plan_training
from infinity.tiers.copies import State
from tests import prepared
from tests.behaviour.disks import FailingDisk, mounted, swap_on
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import Placement, Recipe, batches, least_memory, loss_of, tiny_llama
from tests.behaviour.test_grad_spill import spilling
from tests.behaviour.test_ranks import Case, assert_follows, run_cases

pytestmark = pytest.mark.timeout(120)
STEPS = 5
USES = [  # accumulation, clipping, schedule
    pytest.param(3, 0.0, "backward", id="accumulated"),
    pytest.param(1, 0.5, "deferred", id="deferred"),
    pytest.param(3, 0.5, "deferred", id="accumulated-deferred"),
    pytest.param(2, 0.5, "barrier", id="barrier"),
]


def places(engine: infinity.Engine) -> dict[int, int]:
    """Where spilled gradients are in the one swap file: offset and bytes of each unit's."""
    store = engine._runtime.grads
    pieces = [each.extent.pieces for each in store.units if each.extent is not None]
    return {piece.offset: piece.nbytes for (piece,) in pieces}


class Faults:
    """Has the n-th operation on spilled gradients, and all after it, fail."""

    def __init__(self) -> None:
        self._offsets: set[int] = set()
        self._operation = ""
        self._left = 0

    def arm(self, engine: infinity.Engine, operation: str, nth: int) -> None:
        self._offsets = set(places(engine))
        self._operation, self._left = operation, nth

    def heal(self) -> None:
        self._operation = ""

    def __call__(self, operation: str, offset: int) -> bool:
        if operation != self._operation or offset not in self._offsets:
            return False
        self._left -= 1
        return self._left <= 0


@pytest.fixture(autouse=True)
def _leaves_no_update_thread() -> Iterator[None]:
    """Another test's engine that was dropped without `close` may still have its thread, so only new ones count."""
    before = set(threading.enumerate())
    yield
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name == "infinity-update"]


@pytest.fixture
def faults(monkeypatch) -> Faults:
    faults = Faults()
    swap_on(monkeypatch, lambda engine: FailingDisk(engine, faults))
    return faults


def start(recipe: Recipe, path: Path, schedule: str, **tiering: object) -> infinity.Engine:
    config = recipe.config(spilling(recipe, path, schedule))
    config["tiering"] |= tiering
    return infinity.initialize(model=tiny_llama(), config=config)[0]


def train(engine: infinity.Engine, recipe: Recipe) -> None:
    for ids in batches(recipe.steps * recipe.accumulation):
        engine.backward(loss_of(engine, ids))
        engine.step()
    engine.synchronize()


def go_on(engine: infinity.Engine, ids: torch.Tensor) -> None:
    """After a first backward."""
    for _ in range(3):
        engine.step()
        engine.synchronize()
        engine.backward(loss_of(engine, ids))


@cache
def in_memory(accumulation: int, clipping: float) -> dict[str, torch.Tensor]:
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    with infinity.initialize(model=tiny_llama(), config=recipe.config(Placement()))[0] as engine:
        train(engine, recipe)
        return dict(engine.named_parameters())


def assert_closes_cleanly(engine: infinity.Engine, path: Path) -> None:
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < 20
    assert not list(path.iterdir())
    assert all(torch.isnan(param).all() for param in engine.module.parameters())


# The drive #


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(("accumulation", "clipping", "schedule"), USES)
def test_an_io_error_names_the_file_and_stops_the_engine(
    accumulation, clipping, schedule, operation, nth, faults, tmp_path
) -> None:
    """Some units are updated by then and others are not: to go on, even on a drive that works again, would be wrong."""
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    engine = start(recipe, tmp_path, schedule)
    faults.arm(engine, operation, nth)
    with pytest.raises(infinity.StorageError, match=f"{operation} failed: Input/output error") as failed:
        train(engine, recipe)
    assert failed.value.errno == errno.EIO
    assert [failed.value.filename] == [str(file) for file in tmp_path.iterdir()]
    assert failed.value.offset in places(engine)
    faults.heal()
    for use in (
        lambda: loss_of(engine, batches(1)[0]),
        engine.synchronize,
        engine.step,
        lambda: next(engine.named_parameters()),
    ):
        with pytest.raises(infinity.InfinityError, match=r"has stopped after an error .*Input/output error.* resume"):
            use()
    assert_closes_cleanly(engine, tmp_path)


@pytest.mark.parametrize(("accumulation", "clipping", "schedule"), USES)
def test_short_transfers_are_continued(accumulation, clipping, schedule, monkeypatch, tmp_path) -> None:
    """The kernel may move less than it was asked for, on any request."""
    faults = {"max_transfer": 4096, "interrupt_every": 5}
    monkeypatch.setattr(
        "infinity.tiers.swap.open_engine", lambda options, backend: NativeEngine("threads", options, faults)
    )
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    with start(recipe, tmp_path, schedule) as engine:
        assert places(engine)
        train(engine, recipe)
        for name, weight in engine.named_parameters():
            assert torch.equal(weight, in_memory(accumulation, clipping)[name]), name


@pytest.mark.parametrize(("accumulation", "clipping", "schedule"), USES)
def test_a_file_that_is_cut_off_is_an_error(accumulation, clipping, schedule, tmp_path) -> None:
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    engine = start(recipe, tmp_path, schedule)
    (file,) = tmp_path.iterdir()
    ids, *_ = batches(1)
    engine.backward(loss_of(engine, ids))
    os.truncate(file, min(places(engine)))  # whatever lies behind is cut off as well
    with pytest.raises(infinity.StorageError, match="reached the end of the file") as failed:
        go_on(engine, ids)
    assert failed.value.filename == str(file)
    assert_closes_cleanly(engine, tmp_path)


# Space #


@pytest.mark.parametrize(("accumulation", "clipping", "schedule"), USES)
def test_a_drive_without_room_for_the_gradients_is_refused_with_the_numbers(
    accumulation, clipping, schedule, tmp_path
) -> None:
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    config = recipe.config(spilling(recipe, tmp_path, schedule))
    plan = plan_training(tiny_llama(), load_config(config))
    config["tiering"]["nvme"][0]["capacity"] = plan.nvme_bytes
    infinity.initialize(model=tiny_llama(), config=config)[0].close()
    config["tiering"]["nvme"][0]["capacity"] = plan.nvme_bytes - 4096  # all but the last page of a gradient
    with pytest.raises(infinity.StorageError, match=r"no room for .* more of the model.* of .* taken") as full:
        infinity.initialize(model=tiny_llama(), config=config)
    assert full.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_refused_with_what_is_needed_and_what_is_free(tmp_path) -> None:
    recipe = Recipe("fp32", clipping=0.5)
    config = recipe.config(spilling(recipe, tmp_path))
    config["tiering"]["nvme"] = [{"path": str(tmp_path / "small")}]
    needed = plan_training(tiny_llama(), load_config(config)).nvme_bytes
    with mounted(tmp_path / "small", f"size={needed - 4096}") as mount:
        with pytest.raises(
            infinity.StorageError, match=rf"cannot reserve {needed} bytes .*; {needed - 4096} bytes are free"
        ):
            infinity.initialize(model=tiny_llama(), config=config)
        assert not list(mount.iterdir())


# Checksums #


def flip_a_byte(engine: infinity.Engine, file: Path) -> int:
    """Of gradients that are on the drive alone; returns where."""
    store = engine._runtime.grads
    for unit in list(store.leased):
        if store.units[unit].host.state is State.LEAVING:
            store.await_spill(store.units[unit])
    spilled = (each for each in store.units if each.extent is not None)
    away = next(each for each in spilled if each.host.state is State.ABSENT and each.field.version)
    offset = away.extent.pieces[0].offset + 100
    with file.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))
        os.fsync(raw.fileno())
    return offset - 100


@pytest.mark.parametrize(("accumulation", "clipping", "schedule"), USES)
def test_a_byte_that_flips_on_the_drive_is_found(accumulation, clipping, schedule, tmp_path) -> None:
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    engine = start(recipe, tmp_path, schedule, checksum=True)
    (file,) = tmp_path.iterdir()
    ids, *_ = batches(1)
    engine.backward(loss_of(engine, ids))
    offset = flip_a_byte(engine, file)
    with pytest.raises(infinity.StorageError, match="not those that were written") as damaged:
        go_on(engine, ids)
    assert damaged.value.errno == errno.EBADMSG
    assert damaged.value.filename == str(file)
    assert damaged.value.offset == offset
    assert_closes_cleanly(engine, tmp_path)


def test_checksums_change_no_number(tmp_path) -> None:
    recipe = Recipe("bf16", 3, 0.5, STEPS)
    with start(recipe, tmp_path, "deferred", checksum=True) as engine:
        train(engine, recipe)
        for name, weight in engine.named_parameters():
            assert torch.equal(weight, in_memory(3, 0.5)[name]), name


# The process #

_DIES = """
import os, signal, sys
from pathlib import Path
import pytest
import infinity
from tests.behaviour import test_grad_spill_faults as faults
from tests.behaviour.disks import FailingDisk, swap_on

path, operation, nth = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
class Fatal(faults.Faults):
    def __call__(self, operation, offset):
        if super().__call__(operation, offset):
            os.kill(os.getpid(), signal.SIGKILL)
        return False

fatal = Fatal()
recipe = faults.Recipe("bf16", 3, 0.5, faults.STEPS)
with pytest.MonkeyPatch.context() as patch:
    swap_on(patch, lambda engine: FailingDisk(engine, fatal))
    engine = faults.start(recipe, path, "deferred")
    fatal.arm(engine, operation, nth)
    faults.train(engine, recipe)
"""


@pytest.mark.parametrize(("operation", "nth"), [("write", 11), ("read", 2)])
def test_kill_9_in_the_middle_leaves_a_file_that_the_next_start_removes(operation, nth, tmp_path) -> None:
    died = prepared.run(["-c", _DIES, tmp_path, operation, str(nth)], timeout=100)
    assert died.returncode == -signal.SIGKILL, died.stderr
    (stale,) = tmp_path.iterdir()
    recipe = Recipe("bf16", 3, 0.5, STEPS)
    with start(recipe, tmp_path, "deferred") as engine:
        assert not stale.exists()
        assert len(list(tmp_path.iterdir())) == 1
        train(engine, recipe)
        for name, weight in engine.named_parameters():
            assert torch.equal(weight, in_memory(3, 0.5)[name]), name
    assert not list(tmp_path.iterdir())


# Ranks #


def least_placement(recipe: Recipe, placement: Placement) -> tuple[int, bool]:
    """On a rank: the least budget, and whether gradients spill in it."""
    least = least_memory(tiny_llama(), recipe.config(placement))
    config = recipe.config(dataclasses.replace(placement, host_memory=least))
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        return least, bool(places(engine))


@pytest.mark.parametrize(
    ("precision", "accumulation", "clipping", "schedule"),
    [("fp32", 2, 0.0, "backward"), ("fp32", 1, 0.5, "deferred"), ("bf16", 2, 0.5, "deferred")],
)
def test_two_ranks_follow_plain_torch_and_memory(precision, accumulation, clipping, schedule, tmp_path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    recipe = Recipe(precision, accumulation, clipping, STEPS)
    placement = Placement("nvme", "nvme", swap, "64KiB", schedule=schedule)
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    (least, spills), other = run_ranks(2, least_placement, recipe, placement, path=first, timeout_s=100)
    assert (least, spills) == other
    assert spills
    cases = [Case(3, dataclasses.replace(placement, host_memory=least), recipe, "llama")]
    cases.append(dataclasses.replace(cases[0], placement=Placement()))
    spilled, kept = run_cases(2, cases, second)
    assert_follows(cases[0], spilled, 2)
    for ours, memory in zip(spilled, kept, strict=True):
        assert ours.losses == memory.losses
        for name, weight in ours.weights.items():
            assert torch.equal(weight, memory.weights[name]), name
    assert not list(swap.iterdir())
