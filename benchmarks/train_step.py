"""Seconds, memory and disk traffic of a training step, beside a peer, in turn in one run.

    python benchmarks/train_step.py --peer deepspeed --peer-python PATH --nvme DIR --host-memory 1GiB

The claim: with everything on NVMe, 355M parameters and 128 tokens a step, at most half of DeepSpeed's step time and a
quarter of its peak memory. The floor of a step is the larger of compute (the plain torch loop's forward and
backward) and the bytes that must cross the disk over what the disk moves (`infinity bench-io --op mixed`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.disk import disk_bytes_per_s
from benchmarks.workload import arguments, worker_options

_PEERS = Path(__file__).parent / "peers"


def run_worker(python: str, system: str, options: list[str]) -> dict[str, Any]:
    """One run of one system in a process of its own."""
    worker = "torch" if system == "compute" else system
    command = [python, str(_PEERS / f"{worker}_step.py"), *options, *(["--no-update"] if system == "compute" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit(f"{system} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median over the rounds, with the spread of the steps."""
    first = results[0]
    return {
        **{key: first[key] for key in ("system", "offload", "params", "tokens")},
        "step_s": statistics.median(r["step_s"] for r in results),
        "step_min_s": min(r["step_min_s"] for r in results),
        "step_max_s": max(r["step_max_s"] for r in results),
        "read_bytes_per_param": statistics.median(r["read_bytes_per_param"] for r in results),
        "write_bytes_per_param": statistics.median(r["write_bytes_per_param"] for r in results),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in results),
        "optimizer_s": statistics.median(r["optimizer_s"] for r in results),
        "init_s": statistics.median(r["init_s"] for r in results),
        "first_losses": first["losses"][:4],
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{rows[0]['params'] / 1e6:.0f}M parameters, {rows[0]['tokens']} tokens a step")
    heads = ("step s", "min", "max", "read B/p", "write B/p", "RSS GB", "init s")
    widths = (7, 6, 6, 9, 9, 7, 7)
    print(f"{'system':<10} " + " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        print(
            f"{row['system']:<10} {row['step_s']:>7.2f} {row['step_min_s']:>6.2f} {row['step_max_s']:>6.2f} "
            f"{row['read_bytes_per_param']:>9.2f} {row['write_bytes_per_param']:>9.2f} "
            f"{row['peak_rss_bytes'] / 1e9:>7.2f} {row['init_s']:>7.1f}"
        )
    ours = rows[0]
    for row in rows[1:]:
        time_ratio = ours["step_s"] / row["step_s"]
        memory_ratio = ours["peak_rss_bytes"] / row["peak_rss_bytes"]
        print(f"infinity / {row['system']}: step time {time_ratio:.2f}, peak memory {memory_ratio:.2f}")


def floor(ours: dict[str, Any], compute: dict[str, Any], rates: list[float]) -> dict[str, Any]:
    """The least that a step can take: its bytes over the drive's rate, or computing, in the same run."""
    disk_bytes = (ours["read_bytes_per_param"] + ours["write_bytes_per_param"]) * ours["params"]
    facts = {
        "disk_bytes": disk_bytes,
        "disk_bytes_per_s": rates,
        "disk_s": disk_bytes / statistics.median(rates),
        "compute_s": compute["step_s"],
        "optimizer_s": ours["optimizer_s"],  # on the same cores
    }
    facts["floor_s"] = max(facts["disk_s"], facts["compute_s"] + facts["optimizer_s"])
    facts["ratio"] = ours["step_s"] / facts["floor_s"]
    print(
        f"floor {facts['floor_s']:.2f} s: disk {disk_bytes / 1e9:.2f} GB in {facts['disk_s']:.2f} s, compute "
        f"{facts['compute_s']:.2f} s and optimizer {facts['optimizer_s']:.2f} s; infinity / floor {facts['ratio']:.2f}"
    )
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(parents=[arguments()], add_help=False, description=__doc__)
    parser.add_argument("--peer", action="append", default=[], choices=["deepspeed", "torch"])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter of DeepSpeed's environment")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument(
        "--floor", action="store_true", help="measure the drive and the computation in every round, too"
    )
    args = parser.parse_args()
    options = worker_options(args)
    systems = ["infinity", *args.peer, *(["disk", "compute"] if args.floor else [])]
    results: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    for index in range(args.rounds):
        for system in systems:
            print(f"round {index + 1} of {args.rounds}: {system}", file=sys.stderr, flush=True)
            python = args.peer_python if system == "deepspeed" else sys.executable
            if system == "disk":
                results[system].append({"bytes_per_s": disk_bytes_per_s(args.nvme)})
            else:
                results[system].append(run_worker(python, system, options))
    rows = [summarise(results[system]) for system in systems if system != "disk"]
    print_table(rows)
    if args.floor:
        rows.append(floor(rows[0], rows[-1], [r["bytes_per_s"] for r in results["disk"]]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
