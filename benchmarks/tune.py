"""`infinity tune` beside an exhaustive search, from a bad configuration of a real model.

    python benchmarks/tune.py --nvme DIR --json FILE --html FILE.html

The claim: what `tune` finds is within 5% of the best of an exhaustive search over the knobs that matter most here, in
no more time, and never slower than the configuration that it was given. The bad configuration asks the drive for 64 KiB
at a time, one after the other, updates inside `step()`, and keeps everything on NVMe. `tune` may change every knob;
the exhaustive search measures all of the placements, schedules, ways of asking the drive and cuts of the batch below.
In the end the given, the tuned and the exhaustive search's best configuration take turns, since only runs next to one
another are comparable on a machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from infinity.cli.training.models import build_model
from infinity.cli.tuning.launcher import TrialJob, Trials, Workers
from infinity.memory import available_memory_bytes
from infinity.tuning import Bounds, Limits, Outlook, Setting, keys_of

CLAIM = 1.05


def bad_configuration(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "aio": {"block_size": "64KiB", "queue_depth": 1},
        "tiering": {
            "nvme": [{"path": str(args.nvme)}],
            "host_memory": args.host_memory,
            "update_schedule": "barrier",
        },
    }


def reduced_space(given: Setting) -> list[Setting]:
    """All that the exhaustive search measures; the given one among them."""
    micro, count, _ = given.batch
    batches = [given.batch, (micro, count, "layer"), (micro * count, 1, "micro_batch")]
    ways = [given.aio, (1 << 20, 32, "auto")]
    found = []
    for placement, schedule, aio, batch in product(
        [given.placement, ("none", "nvme")], ["barrier", "backward"], ways, batches
    ):
        found.append(Setting(placement, given.state_format, schedule, given.tile, aio, batch, given.memory))
    return found


def tune(args: argparse.Namespace, config: Path, out: Path) -> dict[str, Any]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "infinity.cli.main", "tune", str(config), "--model", args.model]
    command += ["--out", str(out), "--budget", args.budget, "--seq-len", str(args.seq_len), "--json"]
    command += ["--steps", str(args.steps)] + (["--html", str(args.html)] if args.html else [])
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    start_s = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return {**json.loads(done.stdout), "wall_s": time.perf_counter() - start_s}


def exhaustive(trials: Trials, settings: list[Setting], rounds: int) -> list[dict[str, Any]]:
    """Every setting in turn, round after round, each run to its end."""
    rows: dict[Setting, list[float]] = {setting: [] for setting in settings}
    errors: dict[Setting, str] = {}
    for index, setting in product(range(rounds), settings):
        if setting in errors:
            continue
        run = trials.measure(setting, float("inf"), float("inf"))
        if run.error:
            errors[setting] = run.error
        else:
            rows[setting].append(run.median_s)
        print(f"round {index + 1}: {setting.facts()} {run.median_s:.2f} s {run.error}", file=sys.stderr)
    return [
        {
            "setting": setting.facts(),
            "step_s": statistics.median(seen) if seen else None,
            "runs_s": seen,
            "error": errors.get(setting, ""),
        }
        for setting, seen in rows.items()
    ]


def take_turns(trials: Trials, settings: dict[str, Setting], rounds: int) -> dict[str, list[float]]:
    """Median steps by name, round after round, in an order that turns."""
    found: dict[str, list[float]] = {name: [] for name in settings}
    names = list(settings)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name].append(trials.measure(settings[name], float("inf"), float("inf")).median_s)
            print(f"in turn, round {index + 1}: {name} {found[name][-1]:.2f} s", file=sys.stderr)
    return found


def ratio(turns: dict[str, list[float]], one: str, other: str) -> float:
    """The median of what `one` takes over `other`, round by round."""
    return statistics.median(a / b for a, b in zip(turns[one], turns[other], strict=True))


def table(result: dict[str, Any]) -> str:
    turns = result["turns_s"]
    lines = ["| configuration | step, s, in turn | of the given one's | found in |", "|---|---|---|---|"]
    took = {"given": "", "tuned": f"{result['tune']['wall_s']:.0f} s", "best of all": f"{result['exhaustive_s']:.0f} s"}
    for name in turns:
        middle, share = statistics.median(turns[name]), ratio(turns, name, "given")
        lines.append(f"| {name} | {middle:.2f} | {share:.2f} | {took[name]} |")
    against = result["tuned_over_best"]
    lines.append(f"\nthe tuned step takes {against:.3f} of the best one's (claim: at most {CLAIM})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, help="directory on the drive (default: a temporary one)")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--seq-len", type=int, default=32)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--host-memory", default="640MiB")
    parser.add_argument("--budget", default="6m")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--most-s", type=float, default=15.0, help="of the measured steps of a run; one at least")
    parser.add_argument("--rounds", type=int, default=1, help="of the exhaustive search")
    parser.add_argument("--turns", type=int, default=5, help="of the given, the tuned and the best configuration")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--html", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.nvme) as directory, Workers() as workers:
        args.nvme = Path(directory)
        config, out = args.nvme / "bad.json", args.nvme / "tuned.json"
        values = bad_configuration(args)
        config.write_text(json.dumps(values))
        result: dict[str, Any] = {"load": os.getloadavg(), "options": {k: str(v) for k, v in vars(args).items()}}

        def keep(**more: Any) -> None:
            result.update(more)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")

        keep(tune=tune(args, config, out))
        machine = json.loads((args.nvme / "tuned.search.json").read_text())["machine"]
        bounds = Bounds(Limits(), available_memory_bytes(), 400 << 20)
        outlook = Outlook(build_model(args.model)[0], values, machine, bounds, args.seq_len)
        trials = Trials(
            workers, outlook, TrialJob(args.model, args.seq_len, False, None, args.steps, most_s=args.most_s)
        )
        start_s = time.perf_counter()
        settings = [one for one in reduced_space(outlook.given) if not outlook.of(one).refused]
        rows = exhaustive(trials, settings, args.rounds)
        keep(exhaustive=rows, exhaustive_s=time.perf_counter() - start_s)
        best = Setting.of(min(rows, key=lambda row: row["step_s"] or float("inf"))["setting"])
        tuned = Setting.of(result["tune"]["tuned"])
        turns = take_turns(trials, {"given": outlook.given, "tuned": tuned, "best of all": best}, args.turns)
        keep(turns_s=turns, best=keys_of(outlook.config, best), tuned=keys_of(outlook.config, tuned))
        keep(tuned_over_best=ratio(turns, "tuned", "best of all"), tuned_over_given=ratio(turns, "tuned", "given"))
        keep(load_after=os.getloadavg())
    print(table(result))


if __name__ == "__main__":
    main()
