"""Predicted and measured steps on a drive and a model whose speeds are set, so that only the schedule is in question.

    python benchmarks/predicted_schedules.py --nvme DIR --json FILE --plot FILE.png

The claim: the median error is below 10%, the worst below 25%. The engine is the real one, with real files; but every
read and write takes its turn on a drive of so many bytes a second, and blocks sleep where they would compute. What
else runs on the machine then matters little, and a step is as long as windows, lanes and traffic make it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn

import infinity
from benchmarks.predictions import errors_line, plot_errors
from infinity.config import load_config
from infinity.io import IoEngine, IoFile, IoFuture, Priority, Span, open_engine
from infinity.planner import Duplex, Machine, Rates, Work, plan_training, predict_step
from infinity.planner.work import Pass, Product
from tests.behaviour.disks import Disk, LateFuture

WIDTH, BLOCKS, ROWS = 512, 8, 4
DRIVE_BYTES_PER_S = 200e6
FLOP_PER_S = 1e9  # any number: work is made of seconds
OPTIMIZER_PARAMS_PER_S = 3e8


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        budget: share of the way from the least host memory to the most that is of use.
        forward_s, backward_s: of one micro-batch in all blocks.
    """

    name: str
    budget: float = 0.02
    forward_s: float = 0.5
    backward_s: float = 1.0
    schedule: str = "auto"
    clipping: float = 0.0
    accumulation: int = 1
    order: str = "micro_batch"
    precision: str = "fp32"
    state_format: str = "auto"
    params: str = "nvme"


CASES = (
    Case("drive-bound", forward_s=0.2, backward_s=0.4),
    Case("balanced", forward_s=1.0, backward_s=2.0),
    Case("compute-bound", forward_s=2.0, backward_s=4.0),
    Case("deferred, drive-bound", clipping=1.0, forward_s=0.2, backward_s=0.4),
    Case("deferred, balanced", clipping=1.0, forward_s=1.0, backward_s=2.0),
    Case("deferred, compute-bound", clipping=1.0, forward_s=3.0, backward_s=6.0),
    Case("barrier, balanced", schedule="barrier", forward_s=1.0, backward_s=2.0),
    Case("quarter of the memory", budget=0.25),
    Case("half of the memory", budget=0.5),
    Case("all in memory", budget=1.0),
    Case("parameters in memory", params="none"),
    Case("four micro-batches", accumulation=4, forward_s=0.2, backward_s=0.4),
    Case("four, layer by layer", accumulation=4, order="layer", forward_s=0.2, backward_s=0.4),
    Case("bf16, split", precision="bf16", forward_s=0.4, backward_s=0.8),
    Case("bf16, int8 states", precision="bf16", state_format="int8", forward_s=0.4, backward_s=0.8),
)


class Sleep(torch.autograd.Function):
    """Takes its time, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Block(nn.Module):
    """The parameters of a GPT's block, and its time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.seconds = forward_s / len(self.layers), backward_s / len(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Sleep.apply(x + 0.1 * layer(x), *self.seconds)
        return x


class Model(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(case.forward_s / BLOCKS, case.backward_s / BLOCKS) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class Paced(Disk):
    """A drive that serves one request after the other, at so many bytes a second."""

    def __init__(self, engine: IoEngine) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def _submit(self, write: bool, file: IoFile, offset: int, span: Span, priority: Priority, nbytes: int) -> IoFuture:
        return LateFuture(super()._submit(write, file, offset, span, priority, nbytes), self._turn_s(nbytes))

    def _turn_s(self, nbytes: int) -> float:
        """Seconds from now until it is served."""
        with self._lock:
            now_s = time.perf_counter()
            self._free_at_s = max(now_s, self._free_at_s) + nbytes / DRIVE_BYTES_PER_S
            return self._free_at_s - now_s


def paced_drive() -> AbstractContextManager[Any]:
    return patch("infinity.tiers.swap.open_engine", lambda *args: Paced(open_engine(*args)))


def config_of(case: Case, nvme: Path, budget: int | str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "data_types": {"grad_accum_dtype": case.precision},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": case.params},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(nvme), "bandwidth": int(DRIVE_BYTES_PER_S)}],
            "state_format": case.state_format,
            "update_schedule": case.schedule,
            "accumulation": case.order,
            "host_memory": budget,
            "tile_size": "2MiB",
        },
    }
    if case.precision != "fp32":
        values[case.precision] = {"enabled": True}
    return values


def own_seconds(case: Case) -> tuple[float, float]:
    """Forward and backward of the model in plain torch: what the blocks sleep, and what they compute all the same."""
    model, seconds = Model(case), []
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16 if case.precision == "bf16" else torch.float32)
    model.to(x.dtype)
    for _ in range(2):
        start_s = time.perf_counter()
        loss = model(x)
        middle_s = time.perf_counter()
        loss.backward()
        seconds.append((middle_s - start_s, time.perf_counter() - middle_s))
    return seconds[-1]


def run_case(case: Case, nvme: Path, steps: int) -> dict[str, Any]:
    needs = plan_training(Model(case), load_config(config_of(case, nvme, "auto"))).needs
    budget = int(needs.least_bytes + case.budget * (needs.most_bytes - needs.least_bytes))
    values = config_of(case, nvme, budget)
    config = load_config(values)
    plan = plan_training(Model(case), config, Machine())
    forward, backward = (Pass({Product("nt", 1): seconds * FLOP_PER_S}) for seconds in own_seconds(case))
    work = Work(ROWS, forward, backward, 0.0, 0.0, 0.0)
    drive = Duplex(*(DRIVE_BYTES_PER_S,) * 3)
    parts = ("compute", "optimizer", "disk")
    rates = Rates(
        {"nt": ((1, FLOP_PER_S),)},
        optimizer_params_per_s=OPTIMIZER_PARAMS_PER_S,
        disk=drive,
        beside={  # who sleeps holds nobody up
            (part, frozenset({other})): ((ROWS, 1.0),) for part, other in itertools.permutations(parts, 2)
        },
    )
    predicted = predict_step(plan, config, work, rates)
    seconds = []
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16 if case.precision == "bf16" else torch.float32)
    with paced_drive(), infinity.initialize(model=Model(case), config=values)[0] as engine:
        for _ in range(steps + 2):
            start_s = time.perf_counter()
            engine.train_batch(iter([x] * case.accumulation))
            seconds.append(time.perf_counter() - start_s)
        stats = engine.stats()
    moved = stats.tier_bytes
    measured = statistics.fmean(seconds[2:])  # a step may leave work to the next: only the mean has it all
    return {
        **asdict(case),
        "params_count": plan.params,
        "predicted_s": predicted.seconds,
        "measured_s": measured,
        "measured_min_s": min(seconds[2:]),
        "measured_max_s": max(seconds[2:]),
        "error": predicted.seconds / measured - 1,
        "bottleneck": predicted.bottleneck,
        "parts_s": dict(predicted.parts),
        "stall_s": stats.stall_s,
        "phase_s": stats.phase_s,
        "optimizer_s": stats.optimizer_s,
        "predicted_bytes": [plan.traffic.read_bytes, plan.traffic.write_bytes],
        "moved_bytes": [moved.get("nvme_read", 0), moved.get("nvme_write", 0)],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | bound by | predicted s | measured s | error |", "|---|---|---|---|---|"]
    for row in rows:
        cells = f"{row['predicted_s']:.2f} | {row['measured_s']:.2f} | {row['error']:+.0%}"
        lines.append(f"| {row['name']} | {row['bottleneck']} | {cells} |")
    return "\n".join([*lines, errors_line(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme", type=Path, help="directory on the drive (default: a temporary one)")
    parser.add_argument("--only", help="cases whose name has this in it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.nvme) as directory:
        for case in CASES:
            if args.only is None or args.only in case.name:
                rows.append(run_case(case, Path(directory), args.steps))
                print(f"{case.name}: {rows[-1]['error']:+.0%} of {rows[-1]['measured_s']:.2f} s", file=sys.stderr)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot_errors(args.plot, rows)


if __name__ == "__main__":
    main()
