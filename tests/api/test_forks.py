"""A forked child, such as a data loader's worker, costs no copy of the memory and takes nothing from its parent."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity.memory import Arena, StableBuffer
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2

# Python 3.12 and newer warn of it: the child does as a data loader's does.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
MIB = 1 << 20


def mapped(address: int) -> str | None:
    """The flags of the range of this process's memory that an address lies in; None if it is in none."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line
    return None


def in_child(action: Callable[[], object], timeout_s: float = 30) -> int:
    """How a forked child ends that runs `action` and then leaves as a Python process does."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        import atexit  # noqa: PLC0415

        atexit._run_exitfuncs()
        os._exit(0)
    deadline_s = time.monotonic() + timeout_s
    while (reaped := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(reaped[1])


def bounds(address: int) -> str | None:
    """The range of this process's memory that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = line.split()[0].split("-")
        if int(low, 16) <= address < int(high, 16):
            return line.split()[0]
    return None


class Pages(Dataset):
    """Samples that a worker makes, and whether it has the ranges of its parent at some addresses.

    Others may be there: what is not inherited is free for what the child takes itself.
    """

    def __init__(self, addresses: list[int]) -> None:
        self.ranges = {address: bounds(address) for address in addresses}
        self.samples = batches(4)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        return self.samples[index], any(bounds(address) == ours for address, ours in self.ranges.items())


def test_a_data_loaders_workers_have_nothing_of_the_budget(tmp_path) -> None:
    model = tiny_gpt2()
    config = Recipe().config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    with infinity.initialize(model=model, config=config)[0] as engine:
        runtime = engine._runtime
        addresses = [runtime.arena._mapping.address]
        addresses += [each.tensor.data_ptr() for each in runtime.params.units]
        assert all("dc" in (mapped(address) or "").split() for address in addresses)
        loader = DataLoader(Pages(addresses), batch_size=None, num_workers=2, multiprocessing_context="fork")
        losses = []
        for ids, sees_memory in loader:
            assert not sees_memory
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert len(losses) == 4
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("memory", ["arena", "buffer"])
def test_what_lies_at_the_addresses_in_a_child_is_its_own(memory) -> None:
    """Neither giving memory back nor the end of the object that held it in the parent reaches it."""
    if memory == "arena":
        arena = Arena(4 * MIB)
        address, close = arena._mapping.address, arena.close
    else:
        buffer = StableBuffer(4 * MIB)
        buffer.allocate()
        address, close = buffer.address, buffer.close
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def reuse() -> None:
        fixed = 0x10
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
        assert libc.mmap(address, 4 * MIB, protection, flags, -1, 0) == address
        ctypes.memset(address, 7, 4 * MIB)
        close()
        assert ctypes.string_at(address + MIB, 1) == b"\x07"

    assert in_child(reuse) == 0
    ctypes.memset(address, 5, 16)  # the parent's is there as before
    assert ctypes.string_at(address, 2) == b"\x05\x05"


@pytest.mark.parametrize("end", ["leaves", "closes"])
def test_the_end_of_a_child_is_not_that_of_its_parent(end, tmp_path) -> None:
    """The child runs exit handlers, and may close the engine that it has inherited; the parent trains on."""
    config = Recipe("bf16", clipping=0.5).config(Placement("nvme", "nvme", tmp_path, "64KiB", "1GiB"))
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        losses = []
        for index, ids in enumerate(batches(6)):
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()  # updates are under way now
            losses.append(loss.item())
            if index == 2:
                assert in_child(engine.close if end == "closes" else lambda: None) == 0
                assert [path for path in engine._runtime.swap.files() if not path.exists()] == []
        assert losses[-1] < losses[0]
    assert not list(tmp_path.iterdir())
