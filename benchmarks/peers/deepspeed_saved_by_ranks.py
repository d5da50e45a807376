"""One rank that saves and loads a model's checkpoint with DeepSpeed; rank 0 prints the seconds of each as JSON.

For checkpoint.py, beside saved_by_ranks.py. Runs in an environment with deepspeed and transformers, which compiles
nothing: AdamW is torch's. `save_s` ends when DeepSpeed returns, `save_and_flush_s` when the drive has the files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config

SIZES = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16)}


def flush(path: Path) -> None:
    for file in path.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        if file.is_file():  # the next read comes from the drive
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--model", default="gpt2", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank = dist.get_rank()
    layers, width, heads = SIZES[args.model]
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=layers, n_embd=width, n_head=heads))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
    }
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    ids = torch.arange(8)[None]  # moments exist from the first step on
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    times: dict[str, list[float]] = {"save_s": [], "save_and_flush_s": [], "load_s": []}
    nbytes = 0
    for _ in range(args.rounds):
        saved = timed(lambda: engine.save_checkpoint(str(args.dir), tag="tag"))
        flushed = timed(lambda: flush(args.dir / "tag") if rank == 0 else None)
        times["save_s"].append(saved)
        times["save_and_flush_s"].append(saved + flushed)
        nbytes = sum(file.stat().st_size for file in (args.dir / "tag").rglob("*") if file.is_file())
        times["load_s"].append(timed(lambda: engine.load_checkpoint(str(args.dir), tag="tag")))
        if rank == 0:
            shutil.rmtree(args.dir / "tag")
    dist.barrier()
    if rank == 0:
        print(json.dumps({"bytes": nbytes, **times}), flush=True)


if __name__ == "__main__":
    main()
