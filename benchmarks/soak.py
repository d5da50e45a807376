"""Thousands of steps on NVMe under budgets, schedules and backends that change at random, beside the same in torch.

    python benchmarks/soak.py --path DIR [--steps 2000] [--seed 0] [--json FILE]

The claims: every loss is torch's, memory does not grow, and nothing hangs. The run is cut into stretches of random
length. Each opens an engine from the last checkpoint with a budget between the least that works and all
that is useful; within it sequence lengths change from step to step, evaluations come now and then, and steps are
ordinary or layer-major. Training magnifies rounding, so torch takes over our weights (not its moments) where a
stretch begins. A step that takes longer than two minutes prints every thread's stack and ends the run.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.config import load_config
from infinity.planner import plan_training
from infinity.zero.meta import construct_on_meta

VOCAB, SEQ, BATCH = 256, 64, 2
LR, WEIGHT_DECAY = 1e-3, 0.1
HANG_S = 120
SETTLED = 0.25  # share of the run after which memory must not grow any more


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        worst_loss: largest difference of a loss (training or evaluation) from torch's, relative to it.
        settled_rss_bytes, peak_rss_bytes, last_rss_bytes: of the process: the most until a quarter of the run, the
            most after it, and at the end.
        nvme_bytes: read and written by the training steps.
    """

    steps: int
    engines: int
    evaluations: int
    first_loss: float
    last_loss: float
    worst_loss: float
    settled_rss_bytes: int
    peak_rss_bytes: int
    last_rss_bytes: int
    nvme_bytes: int
    seconds: float


def model_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
    )


class Torch:
    """The same training in memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = LlamaForCausalLM(model_config())
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)

    def take_over(self, engine: infinity.Engine) -> None:
        with torch.no_grad():
            for name, values in engine.named_parameters():
                self.model.get_parameter(name).copy_(values)

    def step(self, micro_batches: list[dict[str, torch.Tensor]], clipping: float) -> float:
        losses = []
        for batch in micro_batches:
            loss = self.model(**batch).loss
            (loss / len(micro_batches)).backward()
            losses.append(loss.item())
        if clipping:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clipping)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(losses) / len(losses)


def micro_batch(rng: random.Random) -> dict[str, torch.Tensor]:
    """Arithmetic progressions of a random length."""
    starts = torch.tensor([[rng.randrange(VOCAB)] for _ in range(BATCH)])
    strides = torch.tensor([[rng.randrange(1, 8)] for _ in range(BATCH)])
    ids = (starts + strides * torch.arange(rng.randrange(4, SEQ + 1))) % VOCAB
    return {"input_ids": ids, "labels": ids}


def random_config(rng: random.Random, path: Path) -> dict[str, Any]:
    """A placement that works, with the least memory in a quarter of the cases."""
    clipping = rng.choice([0.0, 1.0])
    schedules = ["auto", "deferred", "speculative", "barrier"] + ([] if clipping else ["backward"])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": rng.choice([1, 2, 3]),
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": rng.choice([0, 1000, 100_000]),
            "offload_param": {"device": rng.choice(["none", "nvme", "nvme"])},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(path)}],
            "tile_size": rng.choice(["16KiB", "64KiB", "256KiB", "1MiB"]),
            "update_schedule": rng.choice(schedules),
            "accumulation": rng.choice(["micro_batch", "layer"]),
            "io_backend": rng.choice(["auto", "threads"]),
            "checksum": rng.random() < 0.25,
            "host_memory": "1GiB",
        },
    }
    with construct_on_meta():
        needs = plan_training(LlamaForCausalLM(model_config()), load_config(config)).needs
    share = rng.choice([0.0, rng.random(), rng.random(), rng.random()])
    spare = needs.most_bytes - needs.least_bytes
    config["tiering"]["host_memory"] = needs.least_bytes + int(share * spare)
    return config


def soak(path: Path, steps: int, seed: int, *, show: bool = False) -> Result:
    """Run `steps` steps in both; the checkpoints and swap files are under `path`."""
    rng = random.Random(seed)
    reference = Torch()
    model = LlamaForCausalLM(model_config())
    model.load_state_dict(reference.model.state_dict())
    losses: list[tuple[float, float]] = []  # ours, torch's
    rss: list[int] = []
    done = engines = evaluations = moved = 0
    started_s = time.perf_counter()
    process = psutil.Process()
    while done < steps:
        config = random_config(rng, path)
        stretch = min(steps - done, rng.randrange(5, 60))
        with infinity.initialize(model=model, config=config)[0] as engine:
            engines += 1
            if done:
                engine.load_checkpoint(path / "checkpoints")
            reference.take_over(engine)
            for _ in range(stretch):
                faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__ or sys.stderr)
                data = [micro_batch(rng) for _ in range(config["gradient_accumulation_steps"])]
                ours = engine.train_batch(data).item()
                losses.append((ours, reference.step(data, config["gradient_clipping"])))
                moved += sum(engine.stats().tier_bytes.values())
                if rng.random() < 0.1:
                    evaluations += 1
                    batch = micro_batch(rng)
                    with torch.no_grad():
                        losses.append((engine(**batch).loss.item(), reference.model(**batch).loss.item()))
                rss.append(process.memory_info().rss)
            done += stretch
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
            engine.save_checkpoint(path / "checkpoints")
        del engine
        model = LlamaForCausalLM(model_config())
        gc.collect()
        if show:
            ours, torchs = losses[-1]
            print(f"step {done}: loss {ours:.5f}, torch {torchs:.5f}, RSS {rss[-1] / 1e6:.0f} MB", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()
    shutil.rmtree(path / "checkpoints", ignore_errors=True)
    gc.collect()
    settled = max(1, int(SETTLED * len(rss)))
    return Result(
        steps=done,
        engines=engines,
        evaluations=evaluations,
        first_loss=losses[0][0],
        last_loss=losses[-1][0],
        worst_loss=max(abs(ours - torchs) / torchs for ours, torchs in losses),
        settled_rss_bytes=max(rss[:settled]),
        peak_rss_bytes=max(rss[settled:]),
        last_rss_bytes=process.memory_info().rss,
        nvme_bytes=moved,
        seconds=time.perf_counter() - started_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = json.dumps(asdict(soak(args.path, args.steps, args.seed, show=True)), indent=2)
    print(result)
    if args.json is not None:
        args.json.write_text(result + "\n")


if __name__ == "__main__":
    main()
