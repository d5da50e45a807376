"""Bytes that each rank holds of parameters, gradients and optimizer states, beside the ZeRO paper's formulas.

    python benchmarks/memory_per_rank.py [--worlds 1,2,4] [--accumulation 1] [--json FILE]
    python benchmarks/memory_per_rank.py --budget 1GiB [--model gpt2-medium] [--worlds 1,2,4]

The claim: within 5% of section 5 of the paper (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"), in bytes a parameter on N ranks: 2 + 2 + K, of which stage 1 divides the optimizer's K by N, stage 2
also the gradients' 2, stage 3 everything. K is 12 in fp16, as in the paper: an fp32 master and two moments. In bf16 it
is 10: of the master only the 16 bits are stored that complete the bf16 weight to it (`split`).

What is counted is what is allocated, when the backward pass of a step has ended and its update has not begun (there is
clipping, so that every gradient is held then): storages of tensors on the compute device, leases of the arena. Beside
them are the working buffers (whole units that were gathered, gradients on their way, staging), which do not grow with
the number of layers, and what the process as a whole has grown by at its peak, from /proc: this has Python's and
gloo's own growth in it, and activations.

With `--budget`, a model is trained at stage 3 in bf16 with all its states on NVMe under that `tiering.host_memory` a
rank. The second claim: on every rank the ledger keeps to the budget, and the process to the budget and 1.2 GiB.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import infinity
from benchmarks.workload import status_bytes
from infinity.cli.training.models import build_model
from infinity.memory import Lease
from tests.behaviour.ranks import run_ranks

WIDTH, LAYERS, BATCH = 512, 24, 2
STATES = {"fp16": 12, "bf16": 10}  # bytes of the optimizer for a parameter
TOLERANCE = 0.05


@dataclass(frozen=True)
class Case:
    """One training run."""

    world: int
    stage: int
    precision: str
    accumulation: int

    def formula(self) -> float:
        """Bytes a parameter."""
        params, grads, states = 2.0, 2.0, float(STATES[self.precision])
        return (
            params / (self.world if self.stage >= 3 else 1)
            + grads / (self.world if self.stage >= 2 else 1)
            + states / (self.world if self.stage >= 1 else 1)
        )

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "data_types": {"grad_accum_dtype": self.precision},
            self.precision: {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage},
        }


class Block(nn.Module):
    """The larger half of a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds."""

    params: int
    grads: int
    states: int
    working: int
    grown: int  # of the process, at its peak


def measure(case: Case) -> tuple[int, Held]:
    """Parameters of the model, and what this rank holds in its second step."""
    before = status_bytes("VmRSS")
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    numel = sum(param.numel() for param in model.parameters())
    with infinity.initialize(model=model, config=case.config())[0] as engine:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for micro_step in range(2 * case.accumulation):
            x = torch.randn(BATCH, WIDTH, generator=generator).to(next(model.parameters()).dtype)
            engine.backward(engine(x).float().square().mean())
            if micro_step == 2 * case.accumulation - 1:
                held = count(engine)
            engine.step()
        engine.synchronize()
        return numel, Held(*held, status_bytes("VmHWM") - before)


def count(engine: infinity.Engine) -> tuple[int, int, int, int]:
    """(parameters, gradients, optimizer states, working buffers); the rooms are looked into from outside."""
    runtime = engine._runtime
    units = range(len(runtime.partition.units))
    staying = sum(storage_bytes(runtime.params.units[unit].tensor) for unit in units if not offloaded(runtime, unit))
    gathered = runtime.host.parts["parameters"].used_bytes if any(offloaded(runtime, unit) for unit in units) else 0
    homes = lease_bytes(each.lease for each in runtime.params.units)
    own = lease_bytes(each.own for each in runtime.grads.units if each.own is not None)
    lent = lease_bytes(each.lease for each in runtime.grads.units if each.lease is not None)
    tiles = [tile.lease for unit in units for tile in runtime.pipeline._states.units[unit].tiles]
    states = lease_bytes(tiles)
    here = [row.total.collected for row in runtime.executor.units if row.total.collected is not None]
    collected = sum(storage_bytes(each.loan.tensor) for each in here)
    staging = runtime.arena.used_bytes - homes - own - lent - states
    return staying + homes, own + lent + collected, states, gathered + staging


def offloaded(runtime: Any, unit: int) -> bool:
    return bool(runtime.sizing.specs[unit].offloaded)


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def lease_bytes(leases: Iterable[Any]) -> int:
    return sum(lease.nbytes for lease in leases if isinstance(lease, Lease))


# Under a budget #

_BESIDE_BYTES = int(1.2 * (1 << 30))  # interpreter, torch, gloo, activations, allocator


def measure_under(model_name: str, budget: str, directory: str) -> dict[str, Any]:
    """What a rank holds and its process grows to in two steps."""
    before = status_bytes("VmRSS")
    offload = {"device": "nvme", "nvme_path": directory}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "tiering": {"host_memory": budget},
    }
    model = build_model(model_name)[0]
    numel = sum(param.numel() for param in model.parameters())
    with infinity.initialize(model=model, config=config)[0] as engine:
        built = status_bytes("VmHWM")
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            ids = torch.randint(0, 1000, (1, 8), generator=generator)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.synchronize()
        ledger = engine._runtime.host
        return {
            "numel": numel,
            "budget": ledger.capacity_bytes,
            "shares": {name: part.capacity_bytes for name, part in ledger.parts.items()},
            "ledger": engine.stats().peak_bytes["host"],
            "before": before,
            "built": built,
            "peak": status_bytes("VmHWM"),
        }


def run_under(model_name: str, budget: str, worlds: Iterable[int]) -> bool:
    """Print a line for every rank; whether all have kept to the budget."""
    kept = True
    for world in worlds:
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "swap").mkdir()
            arguments = (model_name, budget, f"{directory}/swap")
            ranks = run_ranks(world, measure_under, *arguments, path=Path(directory), timeout_s=3600)
        for rank, row in enumerate(ranks):
            within = row["ledger"] <= row["budget"] and row["peak"] <= row["budget"] + _BESIDE_BYTES
            kept &= within
            print(json.dumps({"world": world, "rank": rank, "within": within} | row), flush=True)
    return kept


def run_case(case: Case) -> dict[str, Any]:
    """In processes of its own, so that no memory of an earlier case is used again; the rank that holds most."""
    with tempfile.TemporaryDirectory() as directory:
        results = run_ranks(case.world, measure, case, path=Path(directory))
    numel = results[0][0]
    worst = max((held for _, held in results), key=lambda held: held.params + held.grads + held.states)
    per_param = {name: nbytes / numel for name, nbytes in asdict(worst).items()}
    total = per_param["params"] + per_param["grads"] + per_param["states"]
    formula = case.formula()
    return asdict(case) | per_param | {"total": total, "formula": formula, "ratio": total / formula, "numel": numel}


def line(row: dict[str, Any]) -> str:
    parts = " | ".join(f"{row[key]:.2f}" for key in ("params", "grads", "states", "total", "formula"))
    over = f"{row['ratio'] - 1:+.1%}"
    beside = f"{row['working']:.2f} | {row['grown']:.2f}"
    return f"| {row['precision']} | {row['stage']} | {row['world']} | {parts} | {over} | {beside} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--json", type=Path, help="a file for all cases, one a line")
    parser.add_argument("--budget", help="train --model under this host_memory instead")
    parser.add_argument("--model", default="gpt2-medium")
    options = parser.parse_args()
    worlds = [int(world) for world in options.worlds.split(",")]
    if options.budget:
        return 0 if run_under(options.model, options.budget, worlds) else 1
    print("| | stage | ranks | params | grads | states | sum | formula | | working buffers | process grows |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for precision in STATES:
        for stage in range(4):
            for world in worlds:
                row = run_case(Case(world, stage, precision, options.accumulation))
                rows.append(row)
                print(line(row), flush=True)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 1 if any(row["ratio"] > 1 + TOLERANCE for row in rows) else 0


if __name__ == "__main__":
    from benchmarks import memory_per_rank  # as the ranks' processes, which have a main of their own, find it

    raise SystemExit(memory_per_rank.main())
