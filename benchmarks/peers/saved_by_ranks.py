"""One rank that saves and loads a model's checkpoint; rank 0 prints the seconds of each as JSON. For checkpoint.py."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import infinity
from infinity.cli.training.models import build_model


def timed(action: Callable[[], Any], ranks: int) -> float:
    """Seconds until the last rank is done."""
    if ranks > 1:
        dist.barrier()
    start = time.perf_counter()
    action()
    if ranks > 1:
        dist.barrier()
    return time.perf_counter() - start


def drop_cache(path: Path) -> None:
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }
    engine = infinity.initialize(model=build_model(args.model)[0], config=config)[0]
    saves, loads, nbytes = [], [], 0
    for _ in range(args.rounds):
        saves.append(timed(lambda: engine.save_checkpoint(args.dir, tag="tag"), ranks))
        nbytes = sum(file.stat().st_size for file in (args.dir / "tag").iterdir())
        if rank == 0:
            drop_cache(args.dir / "tag")
        loads.append(timed(lambda: engine.load_checkpoint(args.dir), ranks))
        if rank == 0:
            shutil.rmtree(args.dir / "tag")
            (args.dir / "latest").unlink()
    if ranks > 1:
        dist.barrier()
    engine.close()
    if rank == 0:
        print(json.dumps({"bytes": nbytes, "save_s": saves, "load_s": loads}), flush=True)


if __name__ == "__main__":
    main()
