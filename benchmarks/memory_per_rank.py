"""Bytes that each rank holds of parameters, gradients and optimizer states, beside the ZeRO paper's formulas.

    python benchmarks/memory_per_rank.py [--worlds 1,2,4] [--accumulation 1] [--json FILE]

The claim: within 5% of section 5 of the paper (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"), in bytes a parameter on N ranks: 2 + 2 + K, of which stage 1 divides the optimizer's K by N, stage 2
also the gradients' 2, stage 3 everything. K is 12 in fp16, as in the paper: an fp32 master and two moments. In bf16 it
is 10: of the master only the 16 bits are stored that complete the bf16 weight to it (`split`).

What is counted is what is allocated, when the backward pass of a step has ended and its update has not begun (there is
clipping, so that every gradient is held then): storages of tensors on the compute device, leases of the arena. Beside
them are the working buffers (whole units that were gathered, gradients on their way, staging), which do not grow with
the number of layers, and what the process as a whole has grown by at its peak, from /proc: this has Python's and
gloo's own growth in it, and activations.
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
    staying = sum(storage_bytes(runtime.params.tensor(unit)) for unit in units if not offloaded(runtime, unit))
    gathered = runtime.param_budget.used_bytes if any(offloaded(runtime, unit) for unit in units) else 0
    homes = lease_bytes(getattr(runtime.params, "_homes", ()))
    own = lease_bytes(runtime.grads._own.values())
    lent = sum(lease.memory.nbytes for unit, lease in runtime.grads._open.items() if unit not in runtime.grads._own)
    tiles = [tile.home for unit in units for tile in runtime.pipeline._states.tiles(unit)]
    states = lease_bytes(tiles)
    collected = sum(storage_bytes(c.flat) for c in getattr(engine._step.gradients, "_collected", {}).values())
    spare = sum(storage_bytes(t) for kept in getattr(engine._step.gradients, "_spare", {}).values() for t in kept)
    staging = runtime.arena.used_bytes - homes - own - lent - states
    return staying + homes, own + lent + collected, states, gathered + spare + staging


def offloaded(runtime: Any, unit: int) -> bool:
    return bool(runtime.params.specs[unit].offloaded)


def storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def lease_bytes(homes: Iterable[Any]) -> int:
    return sum(home.nbytes for home in homes if isinstance(home, Lease))


def status_bytes(key: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


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
    options = parser.parse_args()
    worlds = [int(world) for world in options.worlds.split(",")]
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
    raise SystemExit(main())
