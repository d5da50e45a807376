"""Trains on the emulated device for long, with budgets, speeds and placements that are drawn anew all the time.

Every training must have the losses of the CPU bit for bit, and no copy may race with the host. Each round draws a
model, a recipe, a placement, budgets and rates; half of the rounds go on from a checkpoint in another placement. Prints
one JSON line; the exit code is 1 if anything differed.

    python benchmarks/soak_device.py --steps 2000 --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import infinity
from tests.behaviour.reference import Placement, Recipe, batches, least_memory
from tests.device import simdev
from tests.device.training import engine_on, tiny, train_over

TIERS = ("none", "cpu", "nvme")


@dataclass
class Round:
    """What is trained once, and where; plain values, so that a round that failed can be repeated."""

    architecture: str
    precision: str
    accumulation: int
    clipping: float
    params: str
    optimizer: str
    checkpointing: bool
    tight_host: bool
    tiering: dict[str, Any]
    ratio: float  # of the states that are offloaded
    speed: dict[str, float]
    split: int | None  # the step after which a checkpoint moves it to another engine
    steps: int

    def recipe(self) -> Recipe:
        return Recipe(self.precision, self.accumulation, self.clipping, self.steps)


def draw(random_: random.Random, steps: int) -> Round:
    on_drive = random_.random() < 0.3
    tiering: dict[str, Any] = {"update_schedule": random_.choice(["auto", "deferred", "speculative", "barrier"])}
    if tiering["update_schedule"] != "speculative":
        tiering["fill_device"] = random_.choice([True, False, "auto"])
    if on_drive:
        tiering |= {"activations": "nvme", "activation_memory": random_.choice(["512KiB", "2MiB"])}
    return Round(
        architecture=random_.choice(["gpt2", "llama"]),
        precision=random_.choice(["bf16", "fp32"]),
        accumulation=random_.choice([1, 2, 3]),
        clipping=random_.choice([0.0, 0.5]),
        params=random_.choice(TIERS),
        optimizer=random_.choice(TIERS),
        checkpointing=random_.random() < 0.3,
        tight_host=random_.random() < 0.5,
        tiering=tiering | {"device_memory": random_.choice([None, 0, 50_000, 300_000])},
        ratio=random_.choice([1.0, 1.0, 0.6, 0.2]),
        speed=random_.choice(
            [
                {},
                {"launch_us": random_.choice([30, 300])},
                {"h2d": 10 ** random_.uniform(6.8, 8), "d2h": 10 ** random_.uniform(6.8, 8)},
                {"launch_us": 100, "h2d": 3e7, "d2h": 10 ** random_.uniform(6.8, 8), "link_us": 200},
            ]
        ),
        split=random_.randrange(1, steps) if steps > 1 and random_.random() < 0.5 else None,
        steps=steps,
    )


def engine_for(drawn: Round, swap: Path, seed: int, device: str) -> infinity.Engine:
    model: Any = tiny(drawn.architecture, seed)
    if drawn.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    recipe = drawn.recipe()
    if device == "cpu":
        return engine_on("cpu", model, recipe, Placement())
    config = recipe.config(Placement(drawn.params, drawn.optimizer, swap, "64KiB"))
    tiering = drawn.tiering | {"nvme": [{"path": str(swap)}]}
    extra = tiering.pop("device_memory")
    config["tiering"] |= tiering
    if drawn.optimizer != "none":
        config["zero_optimization"]["offload_optimizer"]["ratio"] = drawn.ratio

    def allow(key: str, extra: int) -> None:
        """The least budget, and this much more."""
        least = least_memory(tiny(drawn.architecture), config, key, device="simdev")
        config["tiering"][key] = least + extra

    if extra is not None and drawn.params != "none":
        allow("device_memory", extra)
    if drawn.tight_host and "nvme" in (drawn.params, drawn.optimizer):
        allow("host_memory", 200_000)
    return infinity.initialize(model=model, config=config, device="simdev")[0]


def losses_of(drawn: Round, path: Path, device: str) -> list[float]:
    data = batches(drawn.steps * drawn.accumulation)
    if drawn.split is None or device == "cpu":
        with engine_for(drawn, path, 0, device) as engine:
            return train_with_moves(engine, data, drawn.accumulation)
    stop = drawn.split * drawn.accumulation
    with engine_for(drawn, path, 0, device) as engine:
        losses = train_with_moves(engine, data[:stop], drawn.accumulation)
        engine.save_checkpoint(path / "saved")
    with engine_for(replace(drawn, params=drawn.optimizer, optimizer=drawn.params), path, 1, device) as engine:
        engine.load_checkpoint(path / "saved")
        return losses + train_with_moves(engine, data[stop:], drawn.accumulation)


def train_with_moves(engine: infinity.Engine, data: list[torch.Tensor], accumulation: int) -> list[float]:
    """Train, and have what has come to the device go back between steps, a unit at a time, and then come again."""
    losses = []
    for first in range(0, len(data), accumulation):
        losses += train_over(engine, data[first : first + accumulation])
        filling = engine._step._filling
        if filling is not None and filling.came:
            filling._move_back(1, "the soak moves units")
        elif filling is not None:
            filling._filled = False
    return losses


def soak(steps: int, seed: int, round_steps: int) -> dict[str, Any]:
    """Rounds until this many steps are trained; what was seen."""
    simdev.load()
    simdev.configure(check=1)
    torch.set_num_threads(1)
    random_ = random.Random(seed)
    start_s, trained, rounds, wrong = time.perf_counter(), 0, 0, []
    races = simdev.counts()["races"]
    while trained < steps:
        drawn = draw(random_, min(round_steps, steps - trained))
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            expected = losses_of(drawn, path, "cpu")
            with simdev.configured(**drawn.speed):
                try:
                    seen: Any = losses_of(drawn, path, "simdev")
                except (infinity.InfinityError, RuntimeError) as error:
                    seen = repr(error)
        if seen != expected:
            wrong.append(
                {
                    "round": drawn.__dict__,
                    "expected": expected[-3:],
                    "seen": seen if isinstance(seen, str) else seen[-3:],
                }
            )
        trained += drawn.steps
        rounds += 1
    torch.accelerator.synchronize()
    return {
        "steps": trained,
        "rounds": rounds,
        "seed": seed,
        "wrong": wrong,
        "races": simdev.counts()["races"] - races,
        "queued": simdev.counts()["queued"],
        "leaked_bytes": torch.accelerator.memory_allocated(),
        "seconds": round(time.perf_counter() - start_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--round-steps", type=int, default=100, help="steps of one placement (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = soak(args.steps, args.seed, args.round_steps)
    print(json.dumps(result))
    sys.exit(bool(result["wrong"] or result["races"]))


if __name__ == "__main__":
    main()
