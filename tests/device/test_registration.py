"""Host memory that a device's driver refuses to register."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import CapacityError
from infinity.memory import Arena, pinning
from infinity.memory import arena as arena_module
from tests.behaviour.reference import Placement, Recipe, assert_same_bits
from tests.device import target
from tests.device.training import STEPS, on_cpu_like, train_on_device


class _BlamesTheNextKernel(TorchDispatchMode):
    """As CUDA's runtime: an error stays set until a launch has been blamed for it."""

    pending = False

    def refuse(self, address: int, nbytes: int) -> int:
        self.pending = True
        return 2

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launches = func not in (torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default)
        if launches and self.pending:
            self.pending = False
            raise RuntimeError("CUDA error: out of memory")
        return func(*args, **(kwargs or {}))


@target.emulated_only
def test_a_refused_registration_is_not_blamed_on_the_next_kernel(monkeypatch) -> None:
    device = torch.device("simdev")
    with _BlamesTheNextKernel() as runtime:
        monkeypatch.setattr(torch.get_device_module(device), "register_host", runtime.refuse)
        with pytest.raises(CapacityError, match=r"cannot pin 4.00 KiB of"):
            Arena(4096, pin=device)
        assert torch.ones(1, device=device).sum().item() == 1


@target.emulated_only
def test_memory_is_there_before_it_is_registered(monkeypatch) -> None:
    """A driver would make its pages one by one; several threads have made them."""
    nbytes = 600 << 20
    process, device = psutil.Process(), torch.device("simdev")
    threads, resident = set(), []
    fill = arena_module._fill

    def noted(pages: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        started.wait(10)
        fill(pages)

    def register(address: int, size: int) -> int:
        resident.append(process.memory_info().rss - before)
        return 0

    started = threading.Barrier(2)
    monkeypatch.setattr(arena_module, "_fill", noted)
    monkeypatch.setattr(arena_module, "_TOUCHED_BYTES", nbytes // 2)
    monkeypatch.setattr(arena_module, "thread_count", lambda: 2)
    monkeypatch.setattr(torch.get_device_module(device), "register_host", register)
    before = process.memory_info().rss
    with closing(Arena(nbytes, pin=device)) as made:
        assert resident[0] > 0.9 * nbytes
        assert len(threads) == 2
        monkeypatch.undo()
        made._pinned = ()


@target.emulated_only
def test_a_large_arena_is_registered_in_pieces_that_no_copy_crosses(monkeypatch, tmp_path) -> None:
    """The emulated driver refuses, as a real one does, a copy of bytes of two registrations."""
    expected = on_cpu_like(Recipe(steps=STEPS))
    module, registered = torch.get_device_module(torch.device("simdev")), []
    register = module.register_host

    def noted(address: int, nbytes: int) -> int:
        registered.append(nbytes)
        return register(address, nbytes)

    monkeypatch.setattr(module, "register_host", noted)
    monkeypatch.setattr(pinning, "PIECE_BYTES", 64 << 10)
    result = train_on_device(Recipe(steps=STEPS), Placement("cpu", "cpu"), activations="cpu")
    assert len(registered) > 20
    assert max(registered) == 64 << 10
    assert_same_bits(result, expected)
