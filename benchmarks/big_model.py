"""A model whose states are several times the machine's memory trains on one drive.

    python benchmarks/big_model.py --path DIR --model llama:4b --host-memory 8GiB --steps 10

The claim: 4 billion parameters, 48 GB of states, train on a machine of 24 GB with a budget of 8 GiB: the loss falls,
peak RSS stays under 11 GB, and a step takes at most 1.3 times the disk floor: the bytes that the step moved over what
the drive moves, reading and writing, measured before and after (`infinity bench-io --op mixed`). Needs 12 bytes of disk
a parameter and some space for the measurement.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from workload import disk_bytes

import infinity
from infinity.cli.training.models import build_model
from infinity.config import parse_size
from infinity.io import IoOptions
from infinity.io.bench import BenchSession, bench_file
from infinity.memory import Arena


def disk_bytes_per_s(path: Path, size_bytes: int = 4 << 30) -> float:
    """Of reads and writes at the same time, median of three passes."""
    arena = Arena(256 << 20)
    options = IoOptions()
    with arena.lease(arena.capacity_bytes) as lease, bench_file(path, size_bytes) as file:
        lease.tensor(torch.uint8).random_()
        with BenchSession(file, size_bytes, "auto", options, lease.span()) as session:
            session.fill()
            rate = statistics.median(session.run("mixed").bytes_per_s for _ in range(3))
    arena.close()
    return rate


def batches(count: int, length: int) -> list[torch.Tensor]:
    """Bytes of the Python standard library as tokens, (1, length) each."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [tokens[i * length : (i + 1) * length].unsqueeze(0) for i in range(count)]


def config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
        },
        "tiering": {
            "nvme": [{"path": str(args.path)}],
            "host_memory": args.host_memory,
            "state_format": args.state_format,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--model", default="llama:4b", help="as `infinity train --model` takes it")
    parser.add_argument("--host-memory", type=parse_size, default=8 << 30)
    parser.add_argument("--state-format", default="split")
    parser.add_argument("--length", type=int, default=128, help="tokens a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    before = disk_bytes_per_s(args.path)
    start_s = time.perf_counter()
    model, _ = build_model(args.model)
    engine, *_ = infinity.initialize(model=model, config=config(args))
    params = sum(param.numel() for param in model.parameters())
    facts: dict[str, Any] = {"model": args.model, "params": params, "init_s": time.perf_counter() - start_s}
    facts["steps"] = []
    print(f"{params / 1e9:.2f}G parameters placed in {facts['init_s']:.0f} s", flush=True)
    for ids in batches(args.steps, args.length):
        moved, start_s = sum(disk_bytes()), time.perf_counter()
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        stats = engine.stats()
        step = {
            "loss": loss.item(),
            "seconds": time.perf_counter() - start_s,
            "disk_bytes": sum(disk_bytes()) - moved,
            "stall_s": stats.stall_s,
            "optimizer_s": stats.optimizer_s,
        }
        facts["steps"].append(step)
        print(json.dumps(step), flush=True)
    facts["tier_peak_bytes"] = engine.stats().peak_bytes
    facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine.synchronize()
    facts["disk_bytes_per_s"] = [before, disk_bytes_per_s(args.path)]  # before the files go, which keeps a drive busy
    engine.close()
    settled = facts["steps"][2:] or facts["steps"]
    rate = statistics.mean(facts["disk_bytes_per_s"])
    facts["step_s"] = statistics.median(step["seconds"] for step in settled)
    facts["floor_s"] = statistics.median(step["disk_bytes"] for step in settled) / rate
    facts["ratio"] = facts["step_s"] / facts["floor_s"]
    print(
        f"step {facts['step_s']:.1f} s, disk floor {facts['floor_s']:.1f} s ({rate / 1e9:.2f} GB/s), "
        f"ratio {facts['ratio']:.2f}; peak RSS {facts['peak_rss_bytes'] / 1e9:.2f} GB"
    )
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
