"""How a step's planning and transitions grow with the number of units: thousands of tiny blocks.

    python benchmarks/small_units.py --path DIR [--units 1000,3000,10000] [--json FILE]

The claim: linear. A block computes next to nothing, so that a step is the engine's own work: hooks, plan, transitions,
gradients, updates. `memory` has all that moves in host memory; `drive` has parameters and optimizer states on a drive,
and room for half of the parameters, so that every unit is fetched, evicted and written. Beside them is the time to make
a plan. Prints microseconds a unit, and those that the computing thread itself worked (`cpu`), which a busy machine
changes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import infinity
from benchmarks import overhead
from infinity.errors import CapacityError
from infinity.schedule.plan import make_plan
from tests.behaviour.reference import named_budget

WIDTH = 8


def config_of(path: str, device: str, host_memory: int | str) -> dict[str, Any]:
    config = overhead.config_of(path, device)
    config["tiering"] |= {"host_memory": host_memory, "update_schedule": "deferred", "tile_size": "64KiB"}
    return config


def least_memory(units: int, path: str) -> int:
    """The budget that a refusal asks for."""
    try:
        infinity.initialize(model=overhead.Blocks(units, WIDTH), config=config_of(path, "nvme", 1), device="cpu")
    except CapacityError as error:
        return named_budget(error)
    raise RuntimeError("a budget of one byte was not refused")


def step_us(units: int, steps: int, config: dict[str, Any]) -> tuple[float, float]:
    """Microseconds a unit of the steps that follow a plan, and the computing thread's own; medians."""
    x = torch.randn(2, WIDTH, requires_grad=True)
    times, worked = [], []
    with infinity.initialize(model=overhead.Blocks(units, WIDTH), config=config, device="cpu")[0] as engine:
        for _ in range(2 + steps):
            start_s, worked_s = time.perf_counter(), time.thread_time()
            engine.backward(engine(x))
            engine.step()
            times.append(time.perf_counter() - start_s)
            worked.append(time.thread_time() - worked_s)
    median, median_worked = (statistics.median(each[2:]) / units * 1e6 for each in (times, worked))
    return median, median_worked


def plan_s(units: int) -> float:
    """To make the plan of a forward and a backward pass with room for half of the units."""
    sizes = [4096] * units
    uses = [*range(units), *reversed(range(units))]
    start_s = time.perf_counter()
    make_plan(uses, sizes, sum(sizes) // 2)
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--units", default="1000,3000,10000")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    sys.setrecursionlimit(100_000)
    rows = []
    for units in map(int, args.units.split(",")):
        with tempfile.TemporaryDirectory(dir=args.path) as path:
            half = least_memory(units, path) + units * WIDTH * (WIDTH + 1) * 4 // 2
            memory_us, memory_cpu_us = step_us(units, args.steps, config_of(path, "none", "auto"))
            drive_us, drive_cpu_us = step_us(units, args.steps, config_of(path, "nvme", half))
            row = {
                "units": units,
                "memory_us": memory_us,
                "memory_cpu_us": memory_cpu_us,
                "drive_us": drive_us,
                "drive_cpu_us": drive_cpu_us,
                "plan_us": plan_s(units) / units * 1e6,
            }
        print(json.dumps(row), flush=True)
        rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
