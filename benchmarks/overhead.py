"""Python that a unit costs a step: a model of many tiny blocks, with the engine's bookkeeping and without.

    python benchmarks/overhead.py --path DIR

The claim: under 50 microseconds of Python for each transition of a unit (into use or out of use, in forward and in
backward). Blocks compute next to nothing, so that what the engine adds to a plain loop's forward and backward is its
bookkeeping: hooks, plan, residency. Everything fits the budget; no byte crosses the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity


class Blocks(nn.Module):
    """`count` linear layers, each a unit."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def seconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[repeats // 4 :])


def config_of(path: str, device: str) -> dict[str, Any]:
    """Every block is a unit of its own, with parameters and optimizer states there."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": device},
            "offload_optimizer": {"device": device},
        },
        "tiering": {"nvme": [{"path": path}]},
    }


def with_engine(args: argparse.Namespace, x: torch.Tensor, device: str) -> float:
    """Forward and backward of one micro-batch that no update follows."""
    config = config_of(str(args.path), device) | {"gradient_accumulation_steps": 1_000_000}
    with infinity.initialize(model=Blocks(args.blocks, args.width), config=config, device="cpu")[0] as engine:

        def step() -> None:
            engine.backward(engine(x))
            engine.step()

        return seconds(step, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on a drive")
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    x = torch.randn(2, args.width, requires_grad=True)
    model = Blocks(args.blocks, args.width)

    def plain() -> None:
        model(x).backward()

    plain_s = seconds(plain, args.repeats)
    transitions = 4 * args.blocks  # into use and out of use, in forward and in backward
    facts: dict[str, float] = {"plain_s": plain_s}
    for device in ("none", "nvme"):
        facts[f"{device}_s"] = with_engine(args, x, device)
        facts[f"{device}_us_per_transition"] = (facts[f"{device}_s"] - plain_s) / transitions * 1e6
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
