"""Seconds to save and load a checkpoint, beside torch.save of the same tensors, in turn in one run.

    python benchmarks/checkpoint.py --dir DIR --model gpt2 --rounds 5

The claim: a checkpoint of states that are in memory reaches the drive at more than half of the rate at which the
drive takes plain direct writes, and sooner than torch.save and fsync put the same tensors there. The floor is those
direct writes, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.cli.training.models import build_model

BLOCK = 4 << 20


def make_engine(model_name: str, home: str, state_format: str, swap: Path) -> infinity.Engine:
    model, _ = build_model(model_name)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": home}, "offload_optimizer": {"device": home}},
        "tiering": {"state_format": state_format},
    }
    if home == "nvme":
        config["tiering"] |= {"nvme": [{"path": str(swap)}], "host_memory": "1GiB"}
    return infinity.initialize(model=model, config=config)[0]


def timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def direct_writes(path: Path, nbytes: int) -> None:
    """What the drive takes: whole blocks of aligned memory, one after the other."""
    buffer = mmap.mmap(-1, BLOCK)
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, nbytes)
    with memoryview(buffer) as view:
        for offset in range(0, nbytes // BLOCK * BLOCK, BLOCK):
            os.pwrite(descriptor, view, offset)
    os.fsync(descriptor)
    os.close(descriptor)
    buffer.close()


def torch_save(states: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(states, file)
        file.flush()
        os.fsync(file.fileno())


def drop_cache(path: Path) -> None:
    """Have the next read come from the drive."""
    for file in [path] if path.is_file() else path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty directory on the drive")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    swap = args.dir / "swap"
    swap.mkdir(parents=True)
    systems = {
        "split, in memory": make_engine(args.model, "none", "split", swap),
        "int8, in memory": make_engine(args.model, "none", "int8", swap),
        "split, on NVMe": make_engine(args.model, "nvme", "split", swap),
    }
    params = sum(value.numel() for _, value in systems["split, in memory"].named_parameters())
    states = {field: torch.rand(params) for field in ("master", "exp_avg", "exp_avg_sq")}
    saves: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for _ in range(args.rounds):
        for name, engine in systems.items():
            path = args.dir / "saved" / "tag"
            saves.setdefault(name, []).append(timed(lambda e=engine: e.save_checkpoint(args.dir / "saved", tag="tag")))
            sizes[name] = sum(file.stat().st_size for file in path.iterdir())
            drop_cache(path)
            loads.setdefault(name, []).append(timed(lambda e=engine: e.load_checkpoint(args.dir / "saved")))
            shutil.rmtree(args.dir / "saved")
        file = args.dir / "states.pt"
        saves.setdefault("torch.save", []).append(timed(lambda f=file: torch_save(states, f)))
        sizes["torch.save"] = file.stat().st_size
        drop_cache(file)
        loads.setdefault("torch.save", []).append(timed(lambda f=file: torch.load(f)))
        saves.setdefault("direct writes", []).append(timed(lambda f=file: direct_writes(f, sizes["torch.save"])))
        sizes["direct writes"] = sizes["torch.save"]
        file.unlink()
    for engine in systems.values():
        engine.close()
    shutil.rmtree(args.dir)
    print(f"{params / 1e6:.0f}M parameters, {args.rounds} rounds: median (min to max)")
    rows = []
    for name, seconds in saves.items():
        rows.append({"name": name, "bytes": sizes[name], "save_s": seconds, "load_s": loads.get(name, [])})
        line = f"{name:<18} {sizes[name] / 1e9:5.2f} GB"
        for verb, values in (("save", seconds), ("load", loads.get(name))):
            if values:
                middle = statistics.median(values)
                line += f"   {verb} {middle:5.2f} s ({min(values):.2f} to {max(values):.2f})"
                line += f" {sizes[name] / middle / 1e9:5.2f} GB/s"
        print(line)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
