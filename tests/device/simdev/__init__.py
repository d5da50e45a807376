"""An emulated accelerator, torch device `simdev`: memory, streams and a link of its own, in host memory.

`load()` once a process; torch has no way back. What the device costs and checks is set with `configure`; settings.h
lists the names. `counts()["races"]` says how often the host touched the memory of a copy that was not done.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[2] / "build" / "simdev"
_TORCH = Path(torch.__file__).parent
_OLDEST_TORCH = (2, 13)
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
_ENGINES = ("compute", "h2d", "d2h")
_COUNTS = ("races", "queued", "run_at_once", "host_waits")


def problem() -> str | None:
    """Why there is no emulated device here; None if there is."""
    if _compiler() is None:
        return "the emulated device needs a C++ compiler"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        return f"the emulated device needs torch {'.'.join(map(str, _OLDEST_TORCH))}"
    return None


@cache
def load() -> ctypes.CDLL:
    """Build the device, if its sources have changed, and make it this process's accelerator."""
    path = _built()
    torch.ops.load_library(str(path))
    lib = ctypes.CDLL(str(path))
    lib.simdev_set.argtypes, lib.simdev_set.restype = [ctypes.c_char_p, ctypes.c_double], ctypes.c_bool
    lib.simdev_get.argtypes, lib.simdev_get.restype = [ctypes.c_char_p], ctypes.c_double
    lib.simdev_register.argtypes, lib.simdev_register.restype = [ctypes.c_void_p, ctypes.c_size_t], None
    lib.simdev_unregister.argtypes, lib.simdev_unregister.restype = [ctypes.c_void_p], None
    lib.simdev_busy_s.argtypes, lib.simdev_busy_s.restype = [ctypes.c_int], ctypes.c_double
    lib.simdev_write_trace.argtypes, lib.simdev_write_trace.restype = [ctypes.c_char_p], ctypes.c_bool
    lib.simdev_forgive_races.argtypes, lib.simdev_forgive_races.restype = [ctypes.c_long], None
    for name in _COUNTS:
        getattr(lib, f"simdev_{name}").restype = ctypes.c_long
    torch.utils.rename_privateuse1_backend("simdev")
    torch._register_device_module("simdev", _device_module(lib))  # type: ignore[no-untyped-call]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(torch.accelerator.synchronize)
    return lib


# Settings and measures #


def configure(**settings: float) -> None:
    """Change settings, once all that is queued is done."""
    lib = load()
    torch.accelerator.synchronize()
    for name, value in settings.items():
        if not lib.simdev_set(name.encode(), float(value)):
            raise KeyError(name)


@contextmanager
def configured(**settings: float) -> Iterator[None]:
    """These settings inside; those of before after it."""
    lib = load()
    before = {name: lib.simdev_get(name.encode()) for name in settings}
    configure(**settings)
    try:
        yield
    finally:
        configure(**before)


def counts() -> dict[str, int]:
    """Races that were seen, kernels and copies that were queued, operators that ran at once, and how often the host
    waited for a stream."""
    return {name: getattr(load(), f"simdev_{name}")() for name in _COUNTS}


def busy() -> dict[str, float]:
    """Seconds that each engine has worked so far, on the device's clock."""
    return {name: load().simdev_busy_s(index) for index, name in enumerate(_ENGINES)}


def write_trace(path: Path) -> None:
    """A Chrome trace of what ran while `trace` was set."""
    if not load().simdev_write_trace(str(path).encode()):
        raise OSError(f"cannot write {path}")


# What torch wants to find in `torch.simdev` #


def _device_module(lib: ctypes.CDLL) -> types.ModuleType:
    module = types.ModuleType("torch.simdev")

    def register_host(address: int, nbytes: int) -> int:
        lib.simdev_register(address, nbytes)
        return 0

    # Random kernels use the host's generator.
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(),
        "memory_allocated": lambda device=None: torch.accelerator.memory_allocated(),
        "max_memory_allocated": lambda device=None: torch.accelerator.max_memory_allocated(),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: torch.accelerator.reset_peak_memory_stats(),
        "memory_reserved": lambda device=None: torch.accelerator.memory_reserved(),
        "register_host": register_host,
        "unregister_host": lib.simdev_unregister,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


# Build #


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _built() -> Path:
    sources = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")])
    key = hashlib.sha256(" ".join([torch.__version__, *_FLAGS]).encode())
    for source in sources:
        key.update(source.read_bytes())
    library = _BUILD / f"libsimdev-{key.hexdigest()[:16]}.so"
    if library.exists():
        return library
    _BUILD.mkdir(parents=True, exist_ok=True)
    draft = library.with_suffix(f".{os.getpid()}")
    link = [f"-L{_TORCH}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH}/lib"]
    subprocess.run(
        [_compiler(), *_FLAGS, "-isystem", f"{_TORCH}/include", _HERE / "simdev.cpp", "-o", draft, *link], check=True
    )
    draft.replace(library)  # another process may build it too
    return library
