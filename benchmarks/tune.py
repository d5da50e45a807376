"""`infinity tune` beside an exhaustive search, from a bad configuration of a real model.

    python benchmarks/tune.py --nvme DIR --json FILE --html FILE.html

The claim: what `tune` finds is within 5% of the best of an exhaustive search over the knobs that matter most here, in
no more time, and never slower than the configuration that it was given. The bad configuration asks the drive for 64 KiB
at a time, one after the other, updates inside `step()`, and keeps everything on NVMe. `tune` may change every knob;
the exhaustive search measures all of the placements, schedules, ways of asking the drive and cuts of the batch below.
With `--simulate N` nothing is trained: N machines are made up on which the plan is wrong by up to a fifth for every
value of every knob, and runs of one setting differ, too, so that the exhaustive search knows the truth.

In the end the given, the tuned and the exhaustive search's best configurations take turns, since only runs next to one
another are comparable on a machine that does other work; the best of those counts.
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
from infinity.tuning import Bounds, Limits, Outlook, Setting, choices_of, keys_of
from tests.tuning.simulated import simulated_search
from tests.tuning.test_search import GOOD, outlook_of

CLAIM = 1.05
GIVEN, TUNED = "given", "tuned"


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
    knobs = product([given.placement, ("none", "nvme")], ["barrier", "backward"], ways, batches)
    return [
        Setting(placement, given.state_format, schedule, given.tile, aio, batch, given.memory)
        for placement, schedule, aio, batch in knobs
    ]


def tune(args: argparse.Namespace, config: Path, out: Path) -> dict[str, Any]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "infinity.cli.main", "tune", str(config), "--model", args.model]
    command += ["--out", str(out), "--budget", args.budget, "--seq-len", str(args.seq_len), "--json"]
    command += ["--steps", str(args.steps)] + (["--html", str(args.html)] if args.html else [])
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    start_s = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return {**json.loads(done.stdout), "wall_s": time.perf_counter() - start_s}


def setting_from(facts: dict[str, Any]) -> Setting:
    """The setting whose `facts` these are, as JSON has them."""
    knobs: dict[str, Any] = {knob: tuple(value) if isinstance(value, list) else value for knob, value in facts.items()}
    return Setting(**knobs)


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
    """Median steps by name, round after round, in an order that turns; the given one, which is slow, twice."""
    found: dict[str, list[float]] = {name: [] for name in settings}
    for index in range(rounds):
        names = [name for name in settings if name != GIVEN or index < 2]
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name].append(trials.measure(settings[name], float("inf"), float("inf")).median_s)
            print(f"in turn, round {index + 1}: {name} {found[name][-1]:.2f} s", file=sys.stderr)
    return found


def ratio(turns: dict[str, list[float]], one: str, other: str) -> float:
    """The median of what `one` takes over `other`, round by round."""
    return statistics.median(a / b for a, b in zip(turns[one], turns[other], strict=False))


def table(result: dict[str, Any]) -> str:
    turns = result["turns_s"]
    lines = [
        "| configuration | step, s, in turn (least to most) | of the given one's | found in |",
        "|---|---|---|---|",
    ]
    for name, seen in turns.items():
        took = {GIVEN: "", TUNED: f"{result['tune']['wall_s']:.0f} s"}.get(name, f"{result['exhaustive_s']:.0f} s")
        spread = f"{statistics.median(seen):.2f} ({min(seen):.2f} to {max(seen):.2f})"
        lines.append(f"| {name} | {spread} | {ratio(turns, name, GIVEN):.2f} | {took} |")
    against = result["tuned_over_best"]
    lines.append(f"\nthe tuned step takes {against:.3f} of the best one's (claim: at most {CLAIM})")
    return "\n".join(lines)


def simulate(args: argparse.Namespace) -> str:
    """Where the search ends on machines that are made up."""
    path = Path(tempfile.mkdtemp(dir=args.nvme))
    outlook = outlook_of(path, {"tiering.host_memory": "160MiB"})
    choices = choices_of(outlook.config, Limits(), aio=[GOOD], keep=["batch"])
    lines = [
        "| runs differ by | within 5% | worst | not worse than given | settings that were run | of |",
        "|---|---|---|---|---|---|",
    ]
    for noise in (0.0, 0.02, 0.05, 0.1):
        found = [simulated_search(outlook, choices, seed, noise=noise) for seed in range(args.simulate)]
        within = sum(one.over_best <= CLAIM for one in found) / len(found)
        kept = sum(one.over_given <= 1.0 for one in found) / len(found)
        ran = statistics.fmean(one.measured for one in found)
        worst = max(one.over_best for one in found)
        cells = f"{within:.0%} | {worst:.3f} | {kept:.0%} | {ran:.0f} | {found[0].settings}"
        lines.append(f"| +-{noise:.0%} | {cells} |")
    path.rmdir()
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
    parser.add_argument("--turns", type=int, default=5, help="of the given, the tuned and the best configurations")
    parser.add_argument("--best", type=int, default=2, help="so many of the exhaustive search take part in these")
    parser.add_argument("--json", type=Path, help="results; what is in it already is not measured again")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--simulate", type=int, metavar="N", help="search on so many machines that are made up")
    args = parser.parse_args()
    if args.simulate:
        print(simulate(args))
        return
    result: dict[str, Any] = {}
    if args.json and args.json.exists():
        result = json.loads(args.json.read_text())  # go on with it

    def keep(**more: Any) -> None:
        result.update(more)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=args.nvme) as directory, Workers() as workers:
        args.nvme = Path(directory)
        config, out = args.nvme / "bad.json", args.nvme / "tuned.json"
        values = bad_configuration(args)
        config.write_text(json.dumps(values))
        if "tune" not in result:
            keep(load=os.getloadavg(), options={name: str(value) for name, value in vars(args).items()})
            found = tune(args, config, out)
            keep(machine=json.loads((args.nvme / "tuned.search.json").read_text())["machine"], tune=found)
        bounds = Bounds(Limits(), available_memory_bytes(), 400 << 20)
        outlook = Outlook(build_model(args.model)[0], values, result["machine"], bounds, args.seq_len)
        job = TrialJob(args.model, args.seq_len, False, None, args.steps, most_s=args.most_s)
        trials = Trials(workers, outlook, job)
        if "exhaustive" not in result:
            start_s = time.perf_counter()
            settings = [one for one in reduced_space(outlook.given) if not outlook.of(one).refused]
            rows = exhaustive(trials, settings, args.rounds)
            keep(exhaustive=rows, exhaustive_s=time.perf_counter() - start_s)
        rows = sorted(result["exhaustive"], key=lambda row: row["step_s"] or float("inf"))
        names = {GIVEN: outlook.given, TUNED: setting_from(result["tune"]["tuned"])}
        names |= {
            f"exhaustive, {index + 1}.": setting_from(row["setting"]) for index, row in enumerate(rows[: args.best])
        }
        turns = take_turns(trials, names, args.turns)
        best = min(list(turns)[2:], key=lambda name: statistics.median(turns[name]))
        keep(turns_s=turns, keys={name: keys_of(outlook.config, setting) for name, setting in names.items()})
        keep(tuned_over_best=ratio(turns, TUNED, best), tuned_over_given=ratio(turns, TUNED, GIVEN), best=best)
        keep(load_after=os.getloadavg())
    print(table(result))


if __name__ == "__main__":
    main()
