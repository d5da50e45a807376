"""`infinity env`: what this machine has, and what infinity makes of it."""

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
from infinity.config import format_size
from infinity.errors import InfinityError

_PACKAGES = ("torch", "numpy", "transformers", "safetensors", "pydantic", "aiofiles")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("env", help="show what this machine has and what is chosen")
    parser.add_argument("--path", type=Path, action="append", help="directory on a drive; repeat for several")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print; returns the exit code."""
    report = collect(args.path or [Path()])
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_section(report, 0)
    return 0


def collect(paths: list[Path]) -> dict[str, Any]:
    """Everything that the command shows."""
    return {
        "versions": _versions(),
        "processor": _processor(),
        "memory": _memory(),
        "io": _io(),
        "paths": {str(path): _path(path) for path in paths},
        "gpu": _gpu(),
    }


def _versions() -> dict[str, str]:
    versions = {"infinity": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _processor() -> dict[str, Any]:
    try:
        from infinity import kernels  # noqa: PLC0415  (the command must run where they are missing)
    except InfinityError as error:
        return {"cores": os.cpu_count(), "optimizer kernels": f"missing: {error}"}
    return {
        "cores": os.cpu_count(),
        "instruction sets": ", ".join(kernels.instruction_sets()),
        "optimizer kernels": kernels.active_instruction_set(),
        "optimizer threads": kernels.thread_count(),
    }


def _memory() -> dict[str, str]:
    import psutil  # noqa: PLC0415

    from infinity.memory import available_memory_bytes, memory_limit_bytes  # noqa: PLC0415

    limit = memory_limit_bytes()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "total": format_size(psutil.virtual_memory().total),
        "container's limit": "none" if limit is None else format_size(limit),
        "available": format_size(available_memory_bytes()),
        "memlock limit": locked,
        "transparent huge pages": huge.read_text().strip() if huge.exists() else "unknown",
    }


def _io() -> dict[str, str]:
    from infinity.io import probe_backends  # noqa: PLC0415
    from infinity.io.gds import gds_problem  # noqa: PLC0415

    statuses = probe_backends()
    report = {s.name: f"{'available' if s.available else 'not available'}: {s.reason}" for s in statuses}
    problem = gds_problem()
    report["GPUDirect Storage"] = f"not available: {problem}" if problem else "available"
    report["chosen by auto"] = next(s.name for s in statuses if s.available)
    return report


def _path(path: Path) -> dict[str, str]:
    if not path.is_dir():
        return {"problem": "no such directory"}
    usage = shutil.disk_usage(path)
    report = {
        "filesystem": _filesystem(path),
        "free": f"{format_size(usage.free)} of {format_size(usage.total)}",
        "writable": "yes" if os.access(path, os.W_OK) else "no",
    }
    if report["writable"] == "yes":
        report["direct I/O"] = _direct_io(path)
    return report


def _direct_io(path: Path) -> str:
    from infinity.io import IoOptions, open_engine  # noqa: PLC0415

    engine = open_engine(IoOptions(queue_depth=2, threads=1))
    probe = path / f".infinity-env-{os.getpid()}"
    try:
        file = engine.open(probe, create=True, size_bytes=4096)
        answer = f"yes, aligned to {file.alignment} bytes" if file.direct else "no, through the page cache"
        file.close()
    except OSError as error:
        return f"unknown: {error}"
    finally:
        engine.close()
        probe.unlink(missing_ok=True)
    return answer


def _filesystem(path: Path) -> str:
    """Type of the filesystem that `path` is on."""
    best = ("", "unknown")
    resolved = str(path.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        inside = mount == "/" or resolved == mount or resolved.startswith(f"{mount}/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _gpu() -> dict[str, str]:
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return {"problem": "torch is not installed"}
    if not torch.cuda.is_available():
        return {"devices": "none: the compute device is the CPU"}
    devices = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{properties.name}, {format_size(properties.total_memory)}"
    return devices


def _print_section(values: Mapping[str, Any], depth: int) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            print(f"{'  ' * depth}{name}")
            _print_section(value, depth + 1)
        else:
            print(f"{'  ' * depth}{name:<24} {value}")
