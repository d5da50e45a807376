"""Step time, disk traffic and memory against the host budget, with everything else on NVMe.

    python benchmarks/budget_curve.py --nvme DIR --json FILE --plot FILE.png

The claim: a larger budget is never slower, traffic falls linearly with what fits, and peak memory follows the budget
(at 1 GiB under 2.5 GB, torch and Python included). Budgets take turns, round after round, because the disk drifts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib.figure import Figure

from benchmarks.train_step import run_worker, summarise
from benchmarks.workload import arguments, worker_options
from infinity.config import format_size, parse_size


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    budgets = [row["budget_bytes"] / (1 << 30) for row in rows]
    axes.plot(budgets, [row["step_s"] for row in rows], marker="o", label="step, s")
    traffic = [row["read_bytes_per_param"] + row["write_bytes_per_param"] for row in rows]
    axes.plot(budgets, traffic, marker="s", label="disk traffic, bytes a parameter")
    axes.plot(budgets, [row["peak_rss_bytes"] / 1e9 for row in rows], marker="^", label="peak RSS, GB")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [format_size(row["budget_bytes"]) for row in rows])
    axes.set(title=f"{rows[0]['params'] / 1e6:.0f}M parameters", xlabel="tiering.host_memory", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(parents=[arguments()], add_help=False, description=__doc__)
    parser.add_argument("--budget", nargs="+", type=parse_size, default=[(1 << 29) << i for i in range(5)])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw the curves into this image file")
    args = parser.parse_args()
    options = worker_options(args)
    results: dict[int, list[dict[str, Any]]] = {budget: [] for budget in args.budget}
    for _ in range(args.rounds):
        for budget in args.budget:
            results[budget].append(run_worker(sys.executable, "infinity", [*options, f"--host-memory={budget}"]))
    rows = [{**summarise(runs), "budget_bytes": budget} for budget, runs in results.items()]
    for row in rows:
        traffic = f"{row['read_bytes_per_param']:.2f} + {row['write_bytes_per_param']:.2f} B/param"
        seconds = f"{row['step_s']:.2f} s ({row['step_min_s']:.2f} to {row['step_max_s']:.2f})"
        print(f"{format_size(row['budget_bytes'])}: {seconds}, {traffic}, RSS {row['peak_rss_bytes'] / 1e9:.2f} GB")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(args.plot, rows)


if __name__ == "__main__":
    main()
