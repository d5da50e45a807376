"""Predicted and measured seconds of a step, for configurations that differ in all that a prediction depends on.

    python benchmarks/predicted_vs_measured.py --nvme DIR --json FILE --plot FILE.png

The claim: the median error is below 10%, the worst below 25%. Every configuration trains in a process of its own, on
one thread. Rates are measured in the same process before and after its steps, so that both have the drive as it was in
that minute; the prediction is the mean of both.

Other work may run on the same cores. Products are therefore timed by the CPU time that they take, and from the wall
time of a step is taken away what its compute thread waited for a core while it could have run (`run_delay`, as Linux
counts it in /proc/thread-self/schedstat). On a machine with nothing else to do neither makes a difference. The wall
time itself is in the table, too.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel

import infinity
from benchmarks.workload import status_bytes
from infinity import kernels
from infinity.config import load_config
from infinity.io import IoOptions
from infinity.planner import (
    Machine,
    Rates,
    TrainingPlan,
    count_work,
    estimate,
    plan_training,
    predict_step,
    rates_of,
)
from infinity.profiling import processor, products
from infinity.profiling.collectives import collective_rates
from infinity.profiling.contention import contention, contention_of_ranks, with_those_of_ranks
from infinity.profiling.drives import drive_rates
from infinity.profiling.processor import optimizer_rates
from infinity.profiling.products import operation_cost, product_rates
from infinity.zero.meta import construct_on_meta
from infinity.zero.ranks import Ranks, join_ranks

_COLORS = {"disk": "tab:blue", "compute": "tab:orange"}  # of the plot, by bottleneck


@dataclass(frozen=True)
class Case:
    """One training run of a GPT-2."""

    name: str
    layers: int
    hidden: int
    tokens: int = 128
    budget: str = "auto"
    precision: str = "fp32"
    state_format: str = "auto"
    schedule: str = "auto"
    clipping: float = 0.0
    offload: str = "nvme"
    accumulation: int = 1
    ranks: int = 1
    checkpointing: bool = False
    vocabulary: int = 8192


CASES = (
    Case("in memory", 8, 512, offload="none"),
    Case("all fits", 8, 384, tokens=256),
    Case("deferred", 12, 768, tokens=16, budget="least", clipping=1.0),
    Case("barrier", 8, 768, tokens=16, budget="least", schedule="barrier"),
    Case("few tokens", 12, 768, tokens=8, budget="least"),
    Case("half the memory", 12, 768, tokens=16, budget="half"),
    Case("wide", 4, 1280, tokens=32, budget="least"),
    Case("as much to compute as to move", 8, 768, tokens=64, budget="least"),
    Case("many tokens", 6, 512, tokens=512, budget="half"),
    Case("checkpointed", 8, 512, tokens=256, budget="least", checkpointing=True),
    Case("accumulated", 8, 768, tokens=16, budget="least", accumulation=4),
    Case("GPT-2 124M", 12, 768, tokens=16, budget="least", vocabulary=50257),
    Case("bf16, split", 4, 512, tokens=16, budget="least", precision="bf16"),
    Case("bf16, int8 states", 6, 512, tokens=16, budget="least", precision="bf16", state_format="int8"),
    Case("two ranks", 8, 512, budget="least", ranks=2),
    Case("two ranks, few tokens", 8, 768, tokens=16, budget="least", ranks=2),
)


def config_of(case: Case, nvme: Path, budget: int | None) -> dict[str, Any]:
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": case.offload},
            "offload_optimizer": {"device": case.offload},
        },
        "tiering": {
            "nvme": [{"path": str(nvme)}],
            "state_format": case.state_format,
            "update_schedule": case.schedule,
            "host_memory": budget or "auto",
        },
    }
    if case.precision != "fp32":
        values[case.precision] = {"enabled": True}
    return values


# One rank of one case #


def worker(case: Case, nvme: Path, steps: int) -> None:
    """Measure rates, train, measure rates, predict; rank 0 prints one line."""
    processor.timed = products.timed = cpu_timed  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    kernels.set_threads(1)
    ranks = join_ranks()
    machine = Machine(case.ranks, case.ranks)
    config = load_config(config_of(case, nvme, None), world_size=case.ranks)
    needs = plan_training(model_of(case), config, machine).needs
    budget = None
    if case.budget != "auto":
        share = {"least": 0.02, "half": 0.5}[case.budget]
        budget = int(needs.least_bytes + share * (needs.most_bytes - needs.least_bytes))
    values = config_of(case, nvme, budget)
    config = load_config(values, world_size=case.ranks)
    plan = plan_training(model_of(case), config, machine)
    work = count_work(model_of(case), plan, 1, case.tokens, checkpointing=case.checkpointing)

    rates = [measured_rates(case, plan, nvme, ranks)]
    before_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    torch.manual_seed(0)
    model = model_of(case)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, case.vocabulary, (1, case.tokens), generator=torch.Generator().manual_seed(ranks.rank))
    seconds, delays = [], []
    with infinity.initialize(model=model, config=values)[0] as engine:
        del model
        for _ in range(steps + 2):
            start_s, delay_s = time.perf_counter(), run_delay_s()
            for _ in range(case.accumulation):
                engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                engine.step()
            seconds.append(time.perf_counter() - start_s)
            delays.append(run_delay_s() - delay_s)
        engine.synchronize()
        stats = engine.stats()
    undisturbed = [wall - delay for wall, delay in zip(seconds, delays, strict=True)][2:]
    peak_rss = status_bytes("VmHWM")
    rates.append(measured_rates(case, plan, nvme, ranks))
    predictions = [predict_step(plan, config, work, one) for one in rates]
    needed = estimate(plan, work, before_bytes, predictions[0])
    if ranks.rank == 0:
        middle = predictions[0]
        result = {
            **asdict(case),
            "params": plan.params,
            "budget_bytes": plan.host_bytes,
            "wall_s": statistics.median(seconds[2:]),
            "measured_s": statistics.median(undisturbed),
            "measured_min_s": min(undisturbed),
            "measured_max_s": max(undisturbed),
            "predicted_s": statistics.fmean(one.seconds for one in predictions),
            "predicted_before_s": predictions[0].seconds,
            "predicted_after_s": predictions[1].seconds,
            "parts_s": {name: statistics.fmean(one.parts[name] for one in predictions) for name in middle.parts},
            "bottleneck": middle.bottleneck,
            "beside": {
                f"{part} beside {' and '.join(sorted(others))}": dict(points)
                for (part, others), points in rates[0].beside.items()
            },
            "disk": None if rates[0].disk is None else asdict(rates[0].disk),
            "optimizer_params_per_s": rates[0].optimizer_params_per_s,
            "predicted_phases_s": middle.phases,
            "predicted_waits_s": middle.waits,
            "phase_s": stats.phase_s,
            "stall_s": stats.stall_s,
            "optimizer_s": stats.optimizer_s,
            "estimated": asdict(needed),
            "peak_host_bytes": stats.peak_bytes["host"],
            "nvme_bytes": stats.peak_bytes.get("nvme", 0),
            "peak_rss_bytes": peak_rss,
        }
        print("RESULT " + json.dumps(result), flush=True)


def cpu_timed(body: Any) -> float:
    """CPU seconds of a call."""
    start_s = time.process_time()
    body()
    return time.process_time() - start_s


def run_delay_s() -> float:
    """Seconds that this thread could have run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9


def model_of(case: Case) -> Any:
    config = GPT2Config(
        n_layer=case.layers,
        n_embd=case.hidden,
        n_head=case.hidden // 64,
        vocab_size=case.vocabulary,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    with construct_on_meta():
        return GPT2LMHeadModel(config)


def measured_rates(case: Case, plan: TrainingPlan, nvme: Path, ranks: Ranks) -> Rates:
    """Those of a profile that this case needs, in a few seconds."""
    device = torch.device("cpu")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    ranks.barrier()
    profile: dict[str, Any] = {"link": None, "drives": None, "drives_together": None, "contention": None}
    profile["products"], profile["operations"] = product_rates(device, (dtype,)), [operation_cost(device)]
    ranks.barrier()
    profile["optimizer"], profile["memory"] = optimizer_rates(4 << 20, [1], lambda _: None)
    profile["ranks"] = collective_rates(ranks, device)
    if ranks.rank == 0 and plan.traffic.read_bytes:
        profile |= drive_rates([nvme], 1 << 30, IoOptions(1 << 20, 32, 2), "auto", 1.0, 4 << 20, lambda _: None)
    if plan.traffic.read_bytes == 0:
        profile["contention"] = contention(4 << 20, None, 0.5, computes_here=True)
    found = [profile["drives"], profile["contention"]]
    if ranks.size > 1:
        torch.distributed.broadcast_object_list(found)
        of_ranks = contention_of_ranks(ranks, 4 << 20, 0.5, computes_here=True)
        found[1] = with_those_of_ranks(found[1], of_ranks)
    profile["drives"], profile["contention"] = found
    rates = rates_of(profile, dtype=str(dtype).removeprefix("torch."), state_format=plan.sizing.layout.format)
    # They were measured by each rank on a core of its own, where a profile is of all cores together.
    speed = case.ranks
    assert rates.memory_bytes_per_s is not None
    assert rates.fresh_bytes_per_s is not None
    assert rates.optimizer_params_per_s is not None
    by_layout = {name: tuple((rows, speed * rate) for rows, rate in known) for name, known in rates.products.items()}
    return replace(
        rates,
        products=by_layout,
        memory_bytes_per_s=speed * rates.memory_bytes_per_s,
        fresh_bytes_per_s=speed * rates.fresh_bytes_per_s,
        optimizer_params_per_s=speed * rates.optimizer_params_per_s,
    )


# All cases #


def run_case(case: Case, nvme: Path, steps: int) -> dict[str, Any]:
    """In processes of its own."""
    command = [__file__, "--worker", json.dumps(asdict(case)), "--nvme", str(nvme), "--steps", str(steps)]
    launcher = [] if case.ranks == 1 else ["-m", "infinity.cli.main", "run", "--ranks", str(case.ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, *launcher, *command], capture_output=True, text=True, check=False, env=environment
    )
    for line in done.stdout.splitlines():
        if "RESULT " in line:
            return json.loads(line.partition("RESULT ")[2])
    raise SystemExit(f"{case.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def summarise(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round whose error is the median one, with the spread of all."""
    for one in rounds:
        one["error"] = one["predicted_s"] / one["measured_s"] - 1
    chosen = sorted(rounds, key=lambda one: one["error"])[len(rounds) // 2]
    return {**chosen, "errors": sorted(one["error"] for one in rounds)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | params | tokens | bound by | predicted s | measured s | error | of the rounds | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["errors"][0], row["errors"][-1]
        lines.append(
            f"| {row['name']} | {row['params'] / 1e6:.0f}M | {row['tokens']} | {row['bottleneck']} | "
            f"{row['predicted_s']:.3f} | {row['measured_s']:.3f} | {row['error']:+.0%} | {low:+.0%} to {high:+.0%} | "
            f"{row['wall_s']:.3f} |"
        )
    return "\n".join([*lines, errors_line(rows)])


def memory_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | host ledger, estimated / peak MB | NVMe, MB | RSS, MB | error |", "|---|---|---|---|---|"]
    for row in rows:
        needs = row["estimated"]
        pairs = [
            (needs["budget_bytes"], row["peak_host_bytes"]),
            (needs["nvme_bytes"], row["nvme_bytes"]),
            (needs["process_bytes"], row["peak_rss_bytes"]),
        ]
        cells = " | ".join(f"{expected / 1e6:.0f} / {found / 1e6:.0f}" for expected, found in pairs)
        lines.append(f"| {row['name']} | {cells} | {pairs[2][0] / pairs[2][1] - 1:+.0%} |")
    return "\n".join(lines)


def errors_line(rows: list[dict[str, Any]]) -> str:
    """The median and the worst of `error`."""
    errors = sorted(abs(row["error"]) for row in rows)
    middle = statistics.median(errors)
    return f"\nmedian error {middle:.1%}, worst {errors[-1]:.1%}, of {len(rows)} configurations"


def plot_errors(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw `predicted_s` over `measured_s` with the spread of what was measured, by `name` and `bottleneck`."""
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        spread = [[row["measured_s"] - row["measured_min_s"]], [row["measured_max_s"] - row["measured_s"]]]
        place = row["measured_s"], row["predicted_s"]
        axes.errorbar(*place, xerr=spread, marker="o", color=_COLORS.get(row["bottleneck"], "tab:gray"))
        axes.annotate(row["name"], place, fontsize=7, xytext=(4, 4), textcoords="offset points")
    ends = [min(row["measured_min_s"] for row in rows), max(row["measured_max_s"] for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (1.25, 0.8):
        axes.plot(ends, [factor * end for end in ends], color="gray", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured step, s", ylabel="predicted step, s")
    axes.set_title("blue: bound by the drive, orange: by computing; dashed: 25%")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, help="directory on the drive (default: a temporary one)")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3, help="in turn; the median of them counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(Case(**json.loads(args.worker)), args.nvme, args.steps)
        return
    cases = [case for case in CASES if args.only is None or args.only in case.name]
    results: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory(dir=args.nvme) as directory:
        for index in range(args.rounds):
            for case in cases:
                results[case.name].append(run_case(case, Path(directory), args.steps))
                last = results[case.name][-1]
                ratio = last["predicted_s"] / last["measured_s"] - 1
                print(f"round {index + 1}: {case.name}: {ratio:+.0%} of {last['measured_s']:.3f} s", file=sys.stderr)
                if args.json:
                    rows = [summarise(rounds) for rounds in results.values() if rounds]
                    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    rows = [summarise(rounds) for rounds in results.values()]
    print(table(rows))
    print()
    print(memory_table(rows))
    if args.plot:
        plot_errors(args.plot, rows)


if __name__ == "__main__":
    main()
