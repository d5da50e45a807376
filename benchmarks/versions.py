"""The step time of this version beside another's: for a change that must not cost anything.

    python benchmarks/versions.py --other-python OTHER/.venv/bin/python --nvme DIR --offload nvme --host-memory 2GiB

Both engines are built once, in processes of their own, and then take turns at the machine, a few steps each, in
alternating order. The claim is on the upper 95% bound of the median ratio (bootstrap over the pairs), this version to
the other one. The floor is 1: the same work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.workload import arguments, worker_options

SAMPLES = 4000
WORKER = Path(__file__).parent / "peers" / "paced_step.py"


class Version:
    """One engine, which trains when it is told to."""

    def __init__(self, python: str, options: Sequence[str], ranks: int = 1) -> None:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        self._process = subprocess.Popen(
            [python, *launch, str(WORKER), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, steps: int) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def upper_bound(ratios: Sequence[float]) -> float:
    """Upper 95% bound of the median, by bootstrap."""
    choice = random.Random(0)
    medians = sorted(statistics.median(choice.choices(ratios, k=len(ratios))) for _ in range(SAMPLES))
    return medians[int(0.95 * SAMPLES)]


def compare(args: argparse.Namespace, path: str) -> dict[str, Any]:
    args.nvme = Path(path)
    options = worker_options(args)
    args.host_memory, budget = args.other_host_memory or args.host_memory, args.host_memory
    versions = {
        "here": Version(sys.executable, options, args.ranks),
        "other": Version(args.other_python, worker_options(args), args.ranks),
    }
    try:
        for version in versions.values():
            version.run(args.warmup)
        times: dict[str, list[float]] = {name: [] for name in versions}
        last: dict[str, dict[str, float]] = {}
        for pair in range(args.pairs):
            for name in sorted(versions, reverse=bool(pair % 2)):
                last[name] = versions[name].run(args.group)
                times[name].append(last[name]["s"] / args.group)
            if not args.json:
                print(f"pair {pair + 1}: {times['here'][-1]:.3f} s here, {times['other'][-1]:.3f} s there", flush=True)
    finally:
        for version in versions.values():
            version.close()
    ratios = [here / there for here, there in zip(times["here"], times["other"], strict=True)]
    return {
        "model": f"{args.layers} x {args.hidden}",
        "tokens": args.batch * args.seq,
        "offload": args.offload,
        "host_memory": {"here": budget, "other": args.host_memory},
        "clip": args.clip,
        "ranks": args.ranks,
        "wide_matmul": bool(args.wide_matmul),
        "pairs": args.pairs,
        "steps_a_turn": args.group,
        "step_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "ratio_median": statistics.median(ratios),
        "ratio_upper_95": upper_bound(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "same_loss": last["here"]["loss"] == last["other"]["loss"],
        "rss_gb": {name: told["rss_gb"] for name, told in last.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(parents=[arguments()], add_help=False, description=__doc__)
    parser.add_argument("--other-python", required=True, help="an interpreter whose infinity is the other version")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--group", type=int, default=3, help="steps a turn")
    parser.add_argument("--other-host-memory", help="of the other version: versions may count different things in it")
    parser.add_argument("--ranks", type=int, default=1, help="of each version, on this machine")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    directory = args.nvme
    with tempfile.TemporaryDirectory(dir=directory) as path:
        result = compare(args, path)
    print(json.dumps(result, indent=None if args.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
