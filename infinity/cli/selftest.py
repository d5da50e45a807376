"""`infinity selftest`: check in two minutes that the engine computes correctly on this machine and its device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import path_argument
from infinity.cli.terminal import unwind_on_signals
from infinity.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from infinity.cli.selftesting.outcome import Check, Outcome


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "selftest",
        help="check that training on this machine gives the same bits with states in every tier",
        description="Trains small models with their states in every tier, on the GPU if there is one; takes at most "
        "two minutes. Exits with 1 if something is wrong.",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ...; the GPU by default, if there is one")
    parser.add_argument("--path", type=path_argument, help="directory on a drive (default: the one of temporary files)")
    parser.add_argument("--json", action="store_true", help="one JSON line for each check, and one for all checks")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check and print. Return the exit code."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic sums; cuBLAS reads it once
    from infinity.cli.progress import Progress
    from infinity.cli.selftesting.outcome import outcomes
    from infinity.cli.selftesting.training import same_bits_each_time

    unwind_on_signals()
    device = _device(args.device)
    if args.path is not None and not args.path.is_dir():
        raise ConfigError(f"--path {args.path}: there is no such directory")
    found = []
    directory = tempfile.TemporaryDirectory(prefix="infinity-selftest-", dir=args.path)
    with directory as path, same_bits_each_time(), Progress() as progress:
        for outcome in outcomes(all_checks(device, Path(path)), progress.show):
            found.append(outcome)
            if args.json:
                print(json.dumps(asdict(outcome) | {"verdict": outcome.verdict.value}), flush=True)
    counts = _counts(found)
    if args.json:
        print(json.dumps({"device": str(device), **counts}))
    else:
        print(_table(device, found, counts))
    return 1 if counts["wrong"] else 0


def all_checks(device: torch.device, path: Path) -> list[Check]:
    """Return all checks of a device.

    Args:
        path: a directory on a drive.
    """
    from infinity.cli.selftesting import device as of_device
    from infinity.cli.selftesting.parity import Parity

    return [*of_device.checks(device), *Parity(device, path).checks()]


def _device(asked: str | None) -> torch.device:
    """Return the device that was asked for, or by default the accelerator, or the CPU if there is none."""
    import torch

    from infinity.tiers import accelerator

    seen = accelerator()
    choices = "cpu" if seen is None else f"cpu or {seen.type}"
    try:
        device = torch.device(asked or seen or "cpu")
    except RuntimeError as error:
        raise ConfigError(f"--device {asked}: there is no such kind of device; choose {choices}") from error
    count = 0 if seen is None or device.type != seen.type else torch.accelerator.device_count()
    if device.type != "cpu" and (device.index or 0) >= count:
        raise ConfigError(f"--device {asked}: torch does not see it; choose {choices}")
    return device


# Text output #


def _counts(found: list[Outcome]) -> dict[str, Any]:
    from infinity.cli.selftesting.outcome import Verdict

    counts: dict[str, Any] = {each.value: sum(one.verdict is each for one in found) for each in Verdict}
    return counts | {"seconds": round(sum(one.seconds for one in found), 1)}


def _table(device: torch.device, found: list[Outcome], counts: dict[str, Any]) -> str:
    from infinity.cli.selftesting.outcome import Verdict

    lines = [f"{device}, {sys.platform}: {len(found)} checks in {counts['seconds']} s", ""]
    for area in dict.fromkeys(one.area for one in found):
        of_area = [one for one in found if one.area == area]
        right = sum(one.verdict is Verdict.RIGHT for one in of_area)
        lines.append(f"  {area:<26}{right:>4} of {len(of_area)} right")
        for one in of_area:
            if one.verdict is not Verdict.RIGHT:
                lines.append(f"    {one.verdict.value.upper()}  {one.name}: {one.words}")
    lines += ["", "all is right" if not counts["wrong"] else f"{counts['wrong']} checks are WRONG: do not train here"]
    return "\n".join(lines)
