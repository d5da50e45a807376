"""`infinity env`: show the hardware and software of this machine, and what infinity uses of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity.cli.arguments import path_argument
from infinity.config import format_size
from infinity.errors import InfinityError

_UNKNOWN = {"container_limit_bytes": "none", "memlock_limit_bytes": "unlimited", "optimizer_kernels": "missing"}
_PACKAGES = ("torch", "numpy", "transformers", "safetensors", "pydantic", "aiofiles")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("env", help="show what this machine has, and what infinity uses")
    parser.add_argument("--path", type=path_argument, action="append", help="directory on a drive; can be repeated")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Return the exit code."""
    report = collect(args.path or [Path()])
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_section(report, 0)
    return 0


def collect(paths: list[Path]) -> dict[str, Any]:
    """Return all facts that the command shows, with units in their names; None is unknown or unlimited."""
    return {
        "versions": _versions(),
        "processor": _processor(),
        "memory": _memory(),
        "io": _io(),
        "paths": {str(path): _path(path) for path in paths},
        "devices": _devices(),
    }


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "infinity": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _processor() -> dict[str, Any]:
    cores: dict[str, Any] = {"cores": os.cpu_count(), "usable_cores": len(os.sched_getaffinity(0))}
    try:
        from infinity import kernels
    except InfinityError as error:
        return {**cores, "optimizer_kernels": None, "problem": str(error)}
    return {
        **cores,
        "instruction_sets": kernels.instruction_sets(),
        "optimizer_kernels": kernels.active_instruction_set(),
        "optimizer_threads": kernels.thread_count(),
    }


def _memory() -> dict[str, Any]:
    import psutil

    from infinity.memory import available_memory_bytes, memory_limit_bytes

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "total_bytes": int(psutil.virtual_memory().total),
        "container_limit_bytes": memory_limit_bytes(),
        "available_bytes": available_memory_bytes(),
        "memlock_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "transparent_huge_pages": _huge_pages(),
    }


def _huge_pages() -> str | None:
    """Return the chosen value of the setting, which reads like `always [madvise] never`."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists():
        return None
    return setting.read_text().partition("[")[2].partition("]")[0]


def _io() -> dict[str, Any]:
    from infinity.io import probe_backends
    from infinity.io.gds import gds_problem

    statuses = probe_backends()
    problem = gds_problem()
    return {
        "backends": {status.name: {"available": status.available, "reason": status.reason} for status in statuses},
        "gpudirect_storage": {"available": not problem, "reason": problem or "cuFile works"},
        "chosen_by_auto": next(status.name for status in statuses if status.available),
    }


def _path(path: Path) -> dict[str, Any]:
    from infinity.io.drives import cautions, drive_of

    if not path.is_dir():
        return {"problem": "no such directory"}
    usage, drive, writable = shutil.disk_usage(path), drive_of(path), os.access(path, os.W_OK)
    direct = _direct_io(path) if writable else {"direct_io": None}
    return {
        "filesystem": drive.filesystem,
        "device": drive.device or None,
        "free_bytes": usage.free,
        "total_bytes": usage.total,
        "writable": writable,
        **direct,
        "cautions": cautions(drive, direct=direct["direct_io"] is not False),
    }


def _direct_io(path: Path) -> dict[str, Any]:
    """Return whether direct I/O works in a directory, and with which alignment."""
    from infinity.io import IoOptions, open_engine

    engine = open_engine(IoOptions(queue_depth=2, threads=1))
    probe = path / f".infinity-env-{os.getpid()}"
    try:
        file = engine.open(probe, create=True, size_bytes=4096)
        answer: dict[str, Any] = {
            "direct_io": file.direct,
            "direct_io_alignment_bytes": file.alignment if file.direct else None,
        }
        file.close()
    except OSError as error:
        answer = {"direct_io": None, "problem": str(error)}
    finally:
        engine.close()
        probe.unlink(missing_ok=True)
    return answer


def _devices() -> list[dict[str, Any]]:
    """Return the accelerators."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.accelerator.is_available():
        return []
    kind = str(torch.accelerator.current_accelerator())
    found = []
    for index in range(torch.accelerator.device_count()):
        properties = torch.get_device_module(kind).get_device_properties(index)
        name, nbytes = properties.name, int(properties.total_memory)
        found.append({"kind": kind, "index": index, "name": name, "memory_bytes": nbytes})
    return found


# Text output #


def _print_section(values: Mapping[str, Any], depth: int) -> None:
    for key, value in values.items():
        name = f"{'  ' * depth}{_readable(key)}"
        if isinstance(value, Mapping) and "available" in value:
            backend = f"{'  ' * depth}{key}"  # unchanged, as configurations name it
            print(f"{backend:<28} {'available' if value['available'] else 'not available'}: {value['reason']}")
        elif isinstance(value, Mapping):
            print(name)
            _print_section(value, depth + 1)
        else:
            print(f"{name:<28} {_shown(key, value)}")


def _readable(key: str) -> str:
    return key if "/" in key else key.removesuffix("_bytes").replace("_", " ")


def _shown(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return _UNKNOWN.get(key, "unknown")
    if key.endswith("_bytes"):
        return format_size(value)
    if isinstance(value, list):
        return "; ".join(map(_item, value)) or ("none: the compute device is the CPU" if key == "devices" else "none")
    return str(value)


def _item(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return f"{value['kind']}:{value['index']} {value['name']}, {format_size(value['memory_bytes'])}"
