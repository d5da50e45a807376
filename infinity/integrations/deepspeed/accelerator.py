"""`deepspeed.accelerator`: the device that torch sees, under DeepSpeed's names."""

from __future__ import annotations

import os
from typing import Any

import torch

from infinity.integrations.deepspeed import host_device


class Accelerator:
    """torch's accelerator, or the CPU if there is none."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if found is None else found.type
        self._module: Any = torch.get_device_module(self._name)

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        return self._module.current_device()

    def current_device_name(self) -> str:
        return self._name if self._name == "cpu" else f"{self._name}:{self._module.current_device()}"

    def device_count(self) -> int:
        """Return the number of devices of this machine; on the CPU, the number of processes of the launcher."""
        if self._name != "cpu":
            return int(self._module.device_count())
        started = (os.environ.get(name) for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"))
        return next((int(count) for count in started if count), 1)

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            self._module.set_device(device_index)

    def communication_backend_name(self) -> str:
        return str(torch.distributed.get_default_backend_for_device(self._name))

    def is_available(self) -> bool:
        return True

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            self._module.synchronize(device_index)

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def empty_cache(self) -> None:
        if self._name != "cpu":
            self._module.empty_cache()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the device's module, such as memory statistics, streams and events."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(host_device, name, None) if self._name == "cpu" else None
        found = getattr(self._module, name, None) if found is None else found
        if found is None:
            raise AttributeError(f"get_accelerator() has no {name!r} here: torch.{self._name} has none")
        return found


_accelerator: list[Accelerator] = []


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    if not _accelerator:
        _accelerator.append(Accelerator())
    return _accelerator[0]


def is_current_accelerator_supported() -> bool:
    """Return True: every device of torch is supported."""
    return True
