"""Host memory that a device's driver refuses to register."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infinity import CapacityError
from infinity.memory import Arena
from tests.device import target


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
        with pytest.raises(CapacityError, match="cannot pin 4096 bytes"):
            Arena(4096, pin=device)
        assert torch.ones(1, device=device).sum().item() == 1
