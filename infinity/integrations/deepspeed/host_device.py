"""Attributes of DeepSpeed's accelerator if the CPU computes: torch's random state, and the process's memory.

Memory that is "allocated" or "reserved" is the resident memory of this process, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch

from infinity.errors import ConfigError

_peak_bytes: list[int] = [0]

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state
manual_seed = torch.manual_seed
initial_seed = torch.initial_seed


def default_generator(device_index: int | None = None) -> torch.Generator:
    """Return torch's default generator."""
    return torch.default_generator


def random() -> Any:
    """Return the module `torch.random`."""
    return torch.random


def get_rss() -> int:
    """Return the resident bytes of the process, and update their peak."""
    resident = int(psutil.Process().memory_info().rss)
    _peak_bytes[0] = max(_peak_bytes[0], resident)
    return resident


def reset_rss() -> int:
    """Reset the peak, and return the resident bytes."""
    _peak_bytes[0] = 0
    return get_rss()


def memory_allocated(device_index: int | None = None) -> int:
    """Return the resident bytes of the process."""
    return get_rss()


def max_memory_allocated(device_index: int | None = None) -> int:
    """Return the peak of the resident bytes that any call here has seen."""
    get_rss()
    return _peak_bytes[0]


def reset_max_memory_allocated(device_index: int | None = None) -> None:
    """Reset the peak."""
    reset_rss()


memory_reserved = memory_cached = memory_allocated
max_memory_reserved = max_memory_cached = max_memory_allocated
reset_max_memory_cached = reset_peak_memory_stats = reset_max_memory_allocated


def memory_stats(device_index: int | None = None) -> dict[str, int]:
    """Return the resident bytes and their peak under torch's names."""
    most = max_memory_allocated()
    now = get_rss()
    return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}


def total_memory(device_index: int | None = None) -> int:
    """Return the bytes of the machine's memory."""
    return int(psutil.virtual_memory().total)


def available_memory(device_index: int | None = None) -> int:
    """Return the bytes of the machine's memory that are free or can be freed."""
    return int(psutil.virtual_memory().available)


def use_host_timers() -> bool:
    """Return True: the CPU has finished when a call returns."""
    return True


resolves_data_dependency = handles_memory_backpressure = use_host_timers


def range_push(message: str) -> None:
    """Do nothing: there is no profiler of a device."""


def range_pop() -> None:
    """Do nothing: there is no profiler of a device."""


def lazy_call(callback: Callable[[], Any]) -> Any:
    """Call it at once: there is no device to initialise."""
    return callback()


def is_triton_supported() -> bool:
    """Return False on the CPU."""
    return False


def visible_devices_envs() -> list[str]:
    """Return the names of the environment variables that set which devices a process sees."""
    return ["CUDA_VISIBLE_DEVICES"]


def set_visible_devices_envs(current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
    """Set the variables of `visible_devices_envs`."""
    for name in visible_devices_envs():
        current_env[name] = ",".join(map(str, local_accelerator_ids))


def get_compile_backend() -> str:
    """Return the backend of torch.compile."""
    return "inductor"


def set_compile_backend(backend: str) -> None:
    """Raise ConfigError unless this is the present backend."""
    if backend != get_compile_backend():
        raise ConfigError(f"set_compile_backend({backend!r}): name the backend where you call torch.compile")


def _maker(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def make(values: Any = (), **more: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, **more)

    return make


BFloat16Tensor, HalfTensor = _maker(torch.bfloat16), _maker(torch.float16)
FloatTensor, DoubleTensor = _maker(torch.float32), _maker(torch.float64)
ByteTensor, IntTensor, LongTensor = _maker(torch.uint8), _maker(torch.int32), _maker(torch.int64)
