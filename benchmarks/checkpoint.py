"""Seconds to save and load a checkpoint, beside torch.save of the same tensors, in turn in one run.

    python benchmarks/checkpoint.py --dir DIR --model gpt2 --rounds 5

The claim: a checkpoint of states that are in memory reaches the drive at more than half of the rate at which the
drive takes plain direct writes, and sooner than torch.save and fsync put the same tensors there. The floor is those
direct writes, measured in the same run.

    python benchmarks/checkpoint.py --dir DIR --ranks 1 2 4 --rounds 3 [--other-python OTHER/.venv/bin/python]
        [--deepspeed-python PYTHON_WITH_DEEPSPEED]

The claim: several ranks together are no slower than one, since each writes and reads its own part. Every number of
ranks is run in turn, and beside it another version's and DeepSpeed's, if they are given. The floor is direct writes by
as many threads. DeepSpeed returns from a save before the drive has it: its files are flushed then, for a second figure.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.cli.training.models import build_model

BLOCK = 4 << 20
PEERS = Path(__file__).parent / "peers"


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


def save_by_ranks(python: str, worker: str, ranks: int, directory: Path, model: str) -> dict[str, Any]:
    """What the worker says of one group of processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(PEERS / worker), "--dir", str(directory), "--model", model]
    shared = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=shared | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r in range(ranks)
    ]
    said = [process.communicate()[0] for process in processes]
    return json.loads(said[0].splitlines()[-1])


def compare_ranks(args: argparse.Namespace) -> None:
    """Every number of ranks in turn, of this version and the others."""
    systems = {"here": (sys.executable, "saved_by_ranks.py")}
    if args.other_python:
        systems["other"] = args.other_python, "saved_by_ranks.py"
    if args.deepspeed_python:
        systems["deepspeed"] = args.deepspeed_python, "deepspeed_saved_by_ranks.py"
    times: dict[tuple[str, int, str], list[float]] = {}
    nbytes = 0
    for turn in range(args.rounds):
        for ranks in args.ranks:
            for name in sorted(systems, reverse=bool(turn % 2)):
                said = save_by_ranks(*systems[name], ranks, args.dir / "saved", args.model)
                nbytes = said["bytes"]
                for verb in ("save", "save_and_flush", "load"):
                    if seconds := said.get(f"{verb}_s"):
                        times.setdefault((name, ranks, verb), []).extend(seconds)
                print(f"round {turn + 1}: {name}, {ranks} ranks, {said}", flush=True)
            times.setdefault(("direct writes", ranks, "save"), []).append(
                timed(partial(direct_writes_by, args.dir, nbytes, ranks))
            )
    rows: list[dict[str, Any]] = [
        {"name": name, "ranks": ranks, "verb": verb, "bytes": nbytes, "seconds": seconds}
        for (name, ranks, verb), seconds in times.items()
    ]
    for row in rows:
        print(f"{row['name']:<14} {row['ranks']} ranks {row['verb']:<15} {rate(nbytes, row['seconds'])}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def rate(nbytes: int, seconds: Sequence[float]) -> str:
    middle = statistics.median(seconds)
    return f"{middle:5.2f} s ({min(seconds):.2f} to {max(seconds):.2f}) {nbytes / middle / 1e9:5.2f} GB/s"


def direct_writes_by(directory: Path, nbytes: int, threads: int) -> None:
    """As many files as threads, written at once."""
    files = [directory / f"direct-{n}" for n in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda file: direct_writes(file, nbytes // threads), files))
    for file in files:
        file.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty directory on the drive")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--ranks", type=int, nargs="+", help="compare numbers of ranks instead")
    parser.add_argument("--other-python", help="an interpreter whose infinity is another version, for --ranks")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed, for --ranks")
    args = parser.parse_args()
    if args.ranks:
        args.dir.mkdir(parents=True)
        compare_ranks(args)
        shutil.rmtree(args.dir)
        return
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
            saves.setdefault(name, []).append(timed(partial(engine.save_checkpoint, args.dir / "saved", tag="tag")))
            sizes[name] = sum(file.stat().st_size for file in path.iterdir())
            drop_cache(path)
            loads.setdefault(name, []).append(timed(partial(engine.load_checkpoint, args.dir / "saved")))
            shutil.rmtree(args.dir / "saved")
        file = args.dir / "states.pt"
        saves.setdefault("torch.save", []).append(timed(partial(torch_save, states, file)))
        sizes["torch.save"] = file.stat().st_size
        drop_cache(file)
        loads.setdefault("torch.save", []).append(timed(partial(torch.load, file)))
        saves.setdefault("direct writes", []).append(timed(partial(direct_writes, file, sizes["torch.save"])))
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
                line += f"   {verb} {rate(sizes[name], values)}"
        print(line)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
