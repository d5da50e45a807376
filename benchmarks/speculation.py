"""Updates that run ahead of the norm beside those that wait for it, and beside those of a training without clipping.

    python benchmarks/speculation.py --nvme DIR --host-memory 1GiB,2GiB --json FILE
    python benchmarks/speculation.py --nvme DIR --host-memory 1GiB --clips --pairs 14

The claims: where no step clips, `speculative` closes at least 80% of what lies between `deferred` and the `backward`
schedule of a training without clipping; where every step clips, it is at least 0.97 as fast as `deferred`. The engines
are built once, in processes of their own, and take turns at the machine, a few steps each; the order changes. What
clips costs next to nothing, for which two engines alone can take more turns in the same time (`--clips`).
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.versions import Version, upper_bound
from benchmarks.workload import arguments, worker_options

LARGE, SMALL = 1e9, 1e-6  # bounds of the norm that no step, and every step, exceeds
ENGINES: dict[str, tuple[str, float]] = {
    "deferred": ("deferred", LARGE),
    "speculative": ("speculative", LARGE),
    "backward": ("backward", 0.0),
    "deferred, clips": ("deferred", SMALL),
    "speculative, clips": ("speculative", SMALL),
}


def measure(args: argparse.Namespace, host_memory: str, path: str) -> dict[str, Any]:
    engines: dict[str, Version] = {}
    times: dict[str, list[float]] = {name: [] for name in ENGINES if not args.clips or name.endswith("clips")}
    losses: dict[str, float] = {}
    try:
        for name in times:
            schedule, clip = ENGINES[name]
            options = copy.copy(args)
            options.nvme, options.host_memory, options.schedule, options.clip = Path(path), host_memory, schedule, clip
            engines[name] = Version(sys.executable, worker_options(options))
            engines[name].run(args.warmup)
        order = random.Random(0)
        for turn in range(args.pairs):
            for name in order.sample(sorted(times), len(times)):
                told = engines[name].run(args.group)
                times[name].append(told["s"] / args.group)
                losses[name] = told["loss"]
            if not args.quiet:
                print(turn + 1, {name: round(seconds[-1], 3) for name, seconds in times.items()}, flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    step_s = {name: statistics.median(seconds) for name, seconds in times.items()}
    row = {
        "model": f"{args.layers} x {args.hidden}",
        "tokens": args.batch * args.seq,
        "host_memory": host_memory,
        "turns": args.pairs,
        "steps_a_turn": args.group,
        "step_s": step_s,
        "times": times,
    }
    if not args.clips:
        span = step_s["deferred"] - step_s["backward"]
        row["gap_closed"] = (step_s["deferred"] - step_s["speculative"]) / span
        row |= _ratio("", times["speculative"], times["deferred"])
    row |= _ratio("clips_", times["speculative, clips"], times["deferred, clips"])
    alike = [name for name in losses if not name.endswith("clips")], [name for name in losses if name.endswith("clips")]
    row["same_loss"] = all(len({losses[name] for name in names}) <= 1 for names in alike)
    return row


def _ratio(prefix: str, seconds: list[float], others: list[float]) -> dict[str, float]:
    """Of pairs, in turn."""
    ratios = [a / b for a, b in zip(seconds, others, strict=True)]
    return {f"{prefix}ratio_median": statistics.median(ratios), f"{prefix}ratio_upper_95": upper_bound(ratios)}


def main() -> int:
    parser = argparse.ArgumentParser(parents=[arguments()], add_help=False, description=__doc__)
    parser.add_argument("--pairs", type=int, default=10, help="turns of each engine")
    parser.add_argument("--group", type=int, default=2, help="steps a turn")
    parser.add_argument("--clips", action="store_true", help="the engines alone of which every step clips")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    rows = []
    for host_memory in args.host_memory.split(","):
        with tempfile.TemporaryDirectory(dir=args.nvme) as path:
            rows.append(measure(args, host_memory, path))
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "times"}, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
