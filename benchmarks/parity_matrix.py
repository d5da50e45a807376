"""Every stage, offload, world size, precision, accumulation and clipping against a plain PyTorch loop.

    python benchmarks/parity_matrix.py [--worlds 1,2,4] [--json FILE]

The claim: on the same global batch, ranks that train with any placement follow a single process with torch's own AdamW
(fp32 masters under 16-bit weights); the placements of one stage and world size give the same bits; what cannot work is
refused by name. Ranks are gloo processes on this machine.

Three distances are taken over a run: of the losses and of the gradient norms, relative, the largest over the steps, and
of the final weights, over the way that they have come. They are at most 1e-4 in fp32. In 16 bits they are at most four
times those between the plain loops in that precision and in fp32: the plain loop itself is that far from the truth. A
norm may also differ by one rounding to that precision, since a plain loop that comes closer does so by chance. The last
table has those distances, and what a mistake would give.

The second claim: `infinity estimate` knows within 5% what rank 0 takes of the host budget and of the drives at most,
and within 10% what its process takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
import infinity
from benchmarks.workload import status_bytes
from infinity.config import load_config
from infinity.errors import InfinityError
from infinity.planner import Machine, count_work, estimate, plan_training
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import DTYPES, LR, SEQ, VOCAB, WEIGHT_DECAY, loss_of, tiny_gpt2

BATCH = 8  # samples of a step over all ranks and micro-batches
STEPS = 8
CLIPPING = 0.5  # the norms are between 1 and 4
LOSS_SCALE_POWER = 10
FP32_TOLERANCE = 1e-4
ROUNDINGS = 4  # ranks and micro-batches round one gradient several times over


@dataclass(frozen=True)
class Case:
    """One training run."""

    world: int
    stage: int
    offload: str
    precision: str
    accumulation: int
    clipping: float

    def config(self, swap: str) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 1000}
        if self.offload != "none":
            device = {"device": self.offload, "nvme_path": swap}
            zero["offload_optimizer"] = device
            zero |= {"offload_param": device} if self.stage == 3 else {}
        return {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", "initial_scale_power": LOSS_SCALE_POWER},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": zero,
            # budgets that the model does not fit in, so that tiles and units move
            "tiering": {"tile_size": "64KiB"} | ({"host_memory": "2.3MB"} if self.offload == "nvme" else {}),
        }


@dataclass(frozen=True)
class Curve:
    """What a run gave."""

    losses: torch.Tensor  # of the global batch, by step
    norms: torch.Tensor
    weights: torch.Tensor  # all of them, flat, in fp32
    taken: dict[str, tuple[int, int]]  # bytes of a tier, or of the process: estimated, and at most


@dataclass(frozen=True)
class Distance:
    """Between two runs, see above."""

    loss: float
    norm: float
    weights: float

    @staticmethod
    def of(run: Curve, expected: Curve, start: torch.Tensor) -> Distance:
        way = (expected.weights - start).norm()
        return Distance(
            ((run.losses - expected.losses).abs() / expected.losses).max().item(),
            ((run.norms - expected.norms).abs() / expected.norms).max().item(),
            ((run.weights - expected.weights).norm() / way).item(),
        )

    def within(self, bound: Distance) -> bool:
        return self.loss <= bound.loss and self.norm <= bound.norm and self.weights <= bound.weights

    def times(self, factor: float) -> Distance:
        return Distance(self.loss * factor, self.norm * factor, self.weights * factor)


def global_batches() -> list[torch.Tensor]:
    """Arithmetic progressions: something that a few steps learn from."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, VOCAB, (STEPS, BATCH, 1), generator=generator)
    strides = torch.randint(1, 4, (STEPS, BATCH, 1), generator=generator)
    return list((starts + strides * torch.arange(SEQ)) % VOCAB)


# The plain loop #


def train_plainly(precision: str, clipping: float, samples: int = BATCH) -> Curve:
    """One process, one micro-batch, nothing of infinity's; `samples` of the batch count."""
    model = tiny_gpt2()
    params = list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in params]
    for param in params:
        param.data = param.data.to(DTYPES[precision])
    scale = 2.0**LOSS_SCALE_POWER if precision == "fp16" else 1.0
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for ids in global_batches():
        loss = loss_of(model, ids[:samples])
        (loss.float() * scale).backward()
        losses.append(loss.item())
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float() / scale, None
        norms.append(torch.nn.utils.clip_grad_norm_(masters, clipping or torch.inf).item())
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, params, strict=True):
                param.copy_(master)
    return Curve(torch.tensor(losses), torch.tensor(norms), flat(dict(model.named_parameters())), {})


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].detach().float().reshape(-1) for name in sorted(weights)])


# The ranks #


def train_here(case: Case, swap: str) -> Curve | str:
    """This rank's part of the run; the message, if the configuration is refused."""
    rank = dist.get_rank()
    before_bytes = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    try:
        engine = infinity.initialize(model=tiny_gpt2(), config=case.config(swap))[0]
    except InfinityError as error:
        return str(error)
    losses, norms = [], []
    with engine:
        for batch in global_batches():
            mine = batch.chunk(case.world)[rank].chunk(case.accumulation)
            total = 0.0
            for ids in mine:
                loss = loss_of(engine, ids)
                engine.backward(loss)
                engine.step()
                total += loss.item() / case.accumulation
            losses.append(total)
            norms.append(engine.get_global_grad_norm())
        peaks = engine.stats().peak_bytes
        most = {"host": peaks["host"], "nvme": peaks.get("nvme", 0), "process": status_bytes("VmHWM")}
        weights = flat(dict(engine.named_parameters()))
    needs = estimated(case, swap, before_bytes)
    return Curve(torch.tensor(losses), torch.tensor(norms), weights, {name: (needs[name], most[name]) for name in most})


def estimated(case: Case, swap: str, before_bytes: int) -> dict[str, int]:
    """As `infinity estimate` has it."""
    config = load_config(case.config(swap), world_size=case.world)
    plan = plan_training(tiny_gpt2(), config, Machine(case.world, case.world))
    micro_batch = BATCH // case.world // case.accumulation
    work = count_work(tiny_gpt2(), plan, micro_batch, SEQ)
    needs = estimate(plan, work, before_bytes)
    return {"host": needs.budget_bytes, "nvme": needs.nvme_bytes, "process": needs.process_bytes}


def train_all(cases: Sequence[Case], swap: str) -> list[Curve | str]:
    train_here(cases[0], swap)  # loads what training loads
    results = []
    for case in cases:
        results.append(train_here(case, swap))
        if dist.get_rank() == 0 and not len(results) % 12:
            print(f"{len(results)} of {len(cases)} cases on {case.world} ranks", file=sys.stderr, flush=True)
    return results


def merge(curves: Sequence[Curve]) -> Curve:
    """The loss of the global batch is the mean over the ranks'; everything else must be the same on all."""
    first = curves[0]
    for other in curves[1:]:
        assert torch.equal(first.weights, other.weights), "the ranks have different weights"
        assert torch.equal(first.norms, other.norms), "the ranks have different norms"
    return replace(first, losses=torch.stack([curve.losses for curve in curves]).mean(0))


def run_world(cases: Sequence[Case]) -> list[Curve | str]:
    """One spawn for all cases of a world size."""
    with tempfile.TemporaryDirectory() as directory:
        swap = Path(directory) / "swap"
        swap.mkdir()
        by_rank = run_ranks(cases[0].world, train_all, cases, str(swap), path=Path(directory), timeout_s=3600)
        assert not list(swap.iterdir()), "swap files are left"
    return [r[0] if isinstance(r[0], str) else merge(r) for r in zip(*by_rank, strict=True)]


# The table #


def compare(cases: Sequence[Case], results: Sequence[Curve | str]) -> list[dict[str, Any]]:
    start = flat(dict(tiny_gpt2().named_parameters()))
    expected = {(p, c): train_plainly(p, c) for p in DTYPES for c in (0.0, CLIPPING)}
    in_memory = {case: result for case, result in zip(cases, results, strict=True) if case.offload == "none"}
    rows = []
    for case, result in zip(cases, results, strict=True):
        row = asdict(case)
        if isinstance(result, str):
            rows.append(row | {"verdict": "refused", "message": result})
            continue
        plain = expected[case.precision, case.clipping]
        bound = Distance(*[FP32_TOLERANCE] * 3)
        if case.precision != "fp32":
            bound = Distance.of(plain, expected["fp32", case.clipping], start).times(ROUNDINGS)
            bound = replace(bound, norm=max(bound.norm, torch.finfo(DTYPES[case.precision]).eps))
        distance = Distance.of(result, plain, start)
        reference = in_memory.get(replace(case, offload="none"))
        same = isinstance(reference, Curve) and torch.equal(reference.weights, result.weights)
        verdict = "follows" if distance.within(bound) else "DIFFERS"
        known = {"bound": asdict(bound), "same_bits": same, "taken": result.taken, "verdict": verdict}
        rows.append(row | asdict(distance) | known)
    return rows


def summarise(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each world size, stage, offload and precision: the worst over accumulation and clipping."""
    lines = [
        "| ranks | stage | offload | precision | cases | loss | norm | weights | same bits as in memory | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = ("world", "stage", "offload", "precision")
    for key, members in itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys)):
        group = list(members)
        head = f"| {' | '.join(str(value) for value in key)} | {len(group)} | "
        if any(row["verdict"] == "refused" for row in group):
            lines.append(head + "| | | | refused: " + group[0]["message"] + " |")
            continue
        worst = " | ".join(f"{max(row[k] for row in group):.0e}" for k in ("loss", "norm", "weights"))
        same = "yes" if all(row["same_bits"] for row in group) else "NO"
        verdict = "follows" if all(row["verdict"] == "follows" for row in group) else "DIFFERS"
        lines.append(f"{head}{worst} | {same} | {verdict} |")
    return lines


def estimates(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Estimated to taken bytes: a line for each number of ranks, stage and offload, the least and the most of all."""
    lines = ["| ranks | stage | offload | host | nvme | process |", "|---|---|---|---|---|---|"]
    trained = [row for row in rows if row["verdict"] != "refused"]
    for key, members in itertools.groupby(
        trained, key=lambda row: tuple(row[k] for k in ("world", "stage", "offload"))
    ):
        group = list(members)
        ratios = {
            name: [row["taken"][name][0] / row["taken"][name][1] for row in group if row["taken"][name][1]]
            for name in group[0]["taken"]
        }
        cells = [f"{min(known):.3f} to {max(known):.3f}" if known else "none" for known in ratios.values()]
        lines.append(f"| {' | '.join(str(value) for value in key)} | {' | '.join(cells)} |")
    return lines


def yardsticks() -> list[str]:
    """What the distances are between plain loops."""
    start = flat(dict(tiny_gpt2().named_parameters()))
    fp32 = train_plainly("fp32", 0.0)
    loops = {
        "plain bf16 loop to the plain fp32 loop": train_plainly("bf16", 0.0),
        "plain fp16 loop to the plain fp32 loop": train_plainly("fp16", 0.0),
        "plain fp32 loop without a quarter of the batch": train_plainly("fp32", 0.0, BATCH * 3 // 4),
        "plain fp32 loop with clipping": train_plainly("fp32", CLIPPING),
    }
    lines = ["| | loss | norm | weights |", "|---|---|---|---|"]
    for name, loop in loops.items():
        values = Distance.of(loop, fp32, start)
        lines.append(f"| {name} | {values.loss:.0e} | {values.norm:.0e} | {values.weights:.0e} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--json", type=Path, help="a file for all cases, one a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    worlds = [int(world) for world in options.worlds.split(",")]
    axes = (range(4), ("none", "cpu", "nvme"), DTYPES, (1, 2), (0.0, CLIPPING))
    began = time.monotonic()
    cases: list[Case] = []
    results: list[Curve | str] = []
    for world in worlds:
        of_world = [Case(world, *values) for values in itertools.product(*axes)]
        cases += of_world
        results += run_world(of_world)
    rows = compare(cases, results)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n".join([*summarise(rows), "", *estimates(rows), "", *yardsticks()]))
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("follows", "refused", "DIFFERS")}
    differing = sum(not row["same_bits"] for row in rows if row["verdict"] != "refused")
    print(f"{counts}, {differing} not bit-identical to memory, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if counts["DIFFERS"] or differing else 0


if __name__ == "__main__":
    from benchmarks import parity_matrix  # as the ranks' processes, which have a main of their own, find it

    raise SystemExit(parity_matrix.main())
