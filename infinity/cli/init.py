"""`infinity init`: measure this machine for some 20 seconds, and write a configuration for it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infinity.cli.arguments import check_directory, check_file, path_argument
from infinity.cli.packages import needed_packages
from infinity.cli.ready import ready_configuration
from infinity.cli.terminal import unwind_on_signals
from infinity.config import check_apart, format_size, load_config, with_values, write_json
from infinity.errors import ConfigError

_BASE = "nvme-all-memory"
# Small and short: enough to choose settings. `infinity profile` measures more precisely, for predictions.
_FILE_BYTES = 256 << 20
_SECONDS = 1.0
_PARAMS = 2 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "init",
        help="measure this machine, and write a configuration for it",
        description="Takes about 20 seconds. Chooses fp32 or bf16 by measuring matrix products of both on the compute "
        "device, and measures the drives, the optimizer and the link. Several drives are striped by their bandwidth.",
    )
    parser.add_argument(
        "--nvme",
        type=path_argument,
        action="append",
        required=True,
        metavar="DIR",
        help="directory on a drive, created if it is missing; can be repeated",
    )
    parser.add_argument(
        "--output", type=path_argument, default=Path("infinity.json"), help="file to write (default infinity.json)"
    )
    parser.add_argument(
        "--profile", type=path_argument, metavar="FILE", help="write the measurements, for `infinity plan`"
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="tiering.host_memory (default: auto)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and write. Return the exit code."""
    if args.output.exists() and not args.force:
        raise ConfigError(f"--output {args.output} already exists: give another name, or --force to replace it")
    check_file("--output", args.output)
    if args.profile is not None:
        check_file("--profile", args.profile)
    load_config(with_values(ready_configuration(_BASE), _given(args)))
    check_apart("--nvme", args.nvme)
    for path in args.nvme:
        check_directory("--nvme", path)
    for path in args.nvme:
        _make(path)
    unwind_on_signals()
    profile, seconds = _measured(args.nvme)
    from infinity.cli.training.precision import faster_precision

    precision = faster_precision(seconds)
    values = _values(args, profile, precision)
    load_config(values)
    if args.profile is not None:
        write_json(args.profile, profile, "the profile")
    write_json(args.output, values, "--output")
    if args.json:
        print(
            json.dumps({"config": str(args.output), "precision": precision, "product_s": seconds, "profile": profile})
        )
    else:
        print("\n".join(_lines(args, profile, precision, seconds)))
    return 0


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--nvme {path} cannot be created: {error.strerror}; give a directory on a drive") from error


def _measured(paths: list[Path]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return a short profile, and the seconds of matrix products on the compute device, by precision."""
    with needed_packages("init"):
        import torch

        from infinity.cli.progress import Progress
        from infinity.cli.training.precision import product_seconds
        from infinity.io import IoOptions
        from infinity.profiling import ProfileJob, run_profile
        from infinity.tiers import accelerator
        from infinity.zero.ranks import ALONE

    with Progress() as progress:
        job = ProfileJob(tuple(paths), _FILE_BYTES, IoOptions.of(load_config({}).aio), "auto", _SECONDS, _PARAMS)
        profile = run_profile(job, ALONE, progress.show)
        return profile, product_seconds(torch.device(accelerator() or "cpu"), ("fp32", "bf16"))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of the configuration that the command line sets."""
    return {} if args.host_memory is None else {"tiering.host_memory": args.host_memory}


def _values(args: argparse.Namespace, profile: dict[str, Any], precision: str) -> dict[str, Any]:
    from infinity.cli.training.configuration import with_precision

    drives: list[dict[str, Any]] = [{"path": str(path.absolute())} for path in args.nvme]
    if len(drives) > 1:
        for drive, measured in zip(drives, profile["drives"], strict=True):
            drive["bandwidth"] = int(measured["mixed_bytes_per_s"])
    changes = {"tiering.nvme": drives, **_given(args)}
    return with_precision(with_values(ready_configuration(_BASE), changes), precision)


def _lines(args: argparse.Namespace, profile: dict[str, Any], precision: str, seconds: dict[str, float]) -> list[str]:
    from infinity.memory import available_memory_bytes

    lines = []
    for drive in profile["drives"]:
        rates = ", ".join(f"{name} {drive[f'{name}_bytes_per_s'] / 1e9:.2f}" for name in ("read", "write", "mixed"))
        lines.append(f"drive {drive['path']}: {rates} GB/s by {drive['backend']}")
        lines += [f"  note: {caution}" for caution in drive["cautions"]]
    ratio = seconds["bf16"] / seconds["fp32"]
    compared = f"{ratio:.1f} times as long as" if ratio > 1 else f"{ratio:.0%} of the time of"
    lines.append(f"precision: {precision}; matrix products in bf16 take {compared} those in fp32")
    memory = args.host_memory or f"auto, of {format_size(available_memory_bytes())} that are free"
    lines.append(f"host memory: {memory}")
    lines.append(f"written: {args.output}, after {profile['took_s']:.0f} s of measuring")
    lines.append(f"next: infinity train MODEL DATA --config {args.output}")
    return lines
