"""A training step on a GPU, measured, beside other systems that offload.

    python benchmarks/gpu_step.py --preset 1.3b [--clip 1.0] [--systems infinity,torch] [--json] [--into DIR]

The model is a decoder of transformers in bf16 with activation checkpoints. Each system runs in a process of its own, if
its package is installed: infinity, torch's AdamW without offload, torchao's CPUOffloadOptimizer, FSDP2 with
CPUOffloadPolicy, and DeepSpeed ZeRO-3. Some steps are timed without a profiler, others are profiled with
torch.profiler. TFLOP/s are 6 x parameters x tokens a step: what is recomputed does not count. The floor of a step is
its busiest engine: kernels, or copies of one kind. The exit code is 1 if there is no accelerator or if infinity failed.

With `--device simdev` everything but the profile runs on the emulated device of the tests, for tests of this command.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.gpu_workload import arguments, shape_of, worker_options

WORKER = Path(__file__).parent / "peers" / "gpu.py"
PACKAGES = {"infinity": "infinity", "torch": "torch", "torchao": "torchao", "fsdp2": "torch", "deepspeed": "deepspeed"}
ON_ANY_DEVICE = ("infinity", "torch")


def missing(system: str, args: argparse.Namespace) -> str | None:
    """Why a system cannot run here; None if it can."""
    if args.device == "simdev" and system not in ON_ANY_DEVICE:
        return "not here: needs a real device"
    if importlib.util.find_spec(PACKAGES[system]) is None:
        return f"not here: {PACKAGES[system]} is not installed"
    return None


def run(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a system, or why there are none."""
    if (reason := missing(system, args)) is not None:
        return {"system": system, "missing": reason}
    command = [sys.executable, str(WORKER), system, *worker_options(args)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return {"system": system, "failed": f"took longer than {args.limit:g} s"}
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    last = done.stderr.strip().splitlines()[-1:]
    return {"system": system, "failed": last[0] if last else f"exit code {done.returncode}"}


# What is printed #


def report(row: dict[str, Any]) -> str:
    reason = row.get("missing") or ("failed" in row and f"failed: {row['failed']}")
    if reason:
        return f"{row['system']:10} {reason}"
    lines = [
        f"{row['system']:10} {row['step_s']:8.3f} s ({row['step_min_s']:.3f} to {row['step_max_s']:.3f})  "
        f"{row['tokens_per_s']:8.0f} tokens/s  {row['tflop_per_s']:6.1f} TFLOP/s  "
        f"peak {row['device_peak_bytes'] / 1e9:.1f} GB on the device, {row['peak_rss_bytes'] / 1e9:.1f} GB on the host"
    ]
    profile = row["profile"]
    if profile is None:
        return "\n".join([*lines, "  profile: not available on this device"])
    gaps = profile["gaps"]
    lines.append(
        f"  computes {profile['computes']:.0%} of {profile['wall_s']:.3f} s (profiled), "
        f"{profile['over_floor']:.2f} of its floor; gaps over 1 ms: "
        f"{gaps['long_count']:.0f}, {gaps['long_s']:.3f} s; shorter ones: {gaps['short_s']:.3f} s"
    )
    for name, copies in profile["copies"].items():
        lines.append(
            f"  {name:14} {copies['count']:6.0f} copies  {copies['nbytes'] / 1e9:7.2f} GB  {copies['s']:.3f} s  "
            f"{copies['bytes_per_s'] / 1e9:6.1f} GB/s  {copies['hidden']:.0%} hidden"
        )
    for what in ("waits", "allocations"):
        calls = ", ".join(f"{name} {each['count']:.0f} ({each['s']:.3f} s)" for name, each in profile[what].items())
        lines.append(f"  {what}: {calls or 'none'}")
    return "\n".join(lines)


def path_of_results(folder: Path, name: str, card: str) -> Path:
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", card).strip("-")
    return folder / f"gpu_step_{name}_{slug}_{datetime.date.today().isoformat()}.json"


def main() -> int:
    parser = argparse.ArgumentParser(
        parents=[arguments()], description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(PACKAGES), help="in this order, by commas")
    parser.add_argument("--limit", type=float, default=900, help="seconds of one system")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--into", type=Path, help="directory for the results, in a file named with card and date")
    parser.add_argument("--name", help="of that file, for example 1.3b-clip; by default the preset's")
    args = parser.parse_args()
    systems = args.systems.split(",")
    if unknown := set(systems) - set(PACKAGES):
        parser.error(f"unknown systems: {', '.join(sorted(unknown))}; there are {', '.join(PACKAGES)}")
    if args.device != "simdev" and not torch.accelerator.is_available():
        print("no accelerator: torch sees none on this machine", file=sys.stderr)
        return 1
    rows = []
    for system in systems:
        rows.append(run(system, args))
        if not args.json:
            print(report(rows[-1]), flush=True)
    card = next((row["card"] for row in rows if "card" in row), "none")
    results = {
        "card": card,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "shape": asdict(shape_of(args)),
        "options": {key: value if value is None else str(value) for key, value in sorted(vars(args).items())},
        "rows": rows,
    }
    text = json.dumps(results, indent=2)
    if args.json:
        print(text)
    if args.into is not None:
        path_of_results(args.into, args.name or args.preset or "step", card).write_text(text + "\n")
    return 1 if any("failed" in row for row in rows if row["system"] == "infinity") else 0


if __name__ == "__main__":
    sys.exit(main())
