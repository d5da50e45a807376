"""A model whose states are several times the machine's memory trains on one drive.

    python benchmarks/big_model.py --path DIR --model llama:4b --host-memory 8GiB --steps 10

The claim: 4 billion parameters, 48 GB of states, train on a machine of 24 GB with a budget of 8 GiB: the loss falls,
peak RSS stays under 11 GB, and a step takes at most 1.3 times the disk floor: the bytes that it moved over what the
drive moves, reading and writing (`infinity bench-io --op mixed`). Drives drift, so the floor is measured in turn with
the steps: for as long as a step takes, before and after every four of them, whose time includes waiting for all that is
in flight. Needs 12 bytes of disk a parameter and some space for the measurement. With `--offload cpu` the states stay
in host memory, all of them, and there is no floor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import infinity
from benchmarks.disk import disk_bytes_per_s
from benchmarks.workload import disk_bytes
from infinity.cli.training.models import build_model
from infinity.config import parse_size

_SETTLING, _GROUP = 2, 4  # steps
_RATE_S = 25.0  # a measurement of the drive takes about as long as a step of 4 billion parameters


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
            "offload_param": {"device": args.offload},
            "offload_optimizer": {"device": args.offload},
        },
        "tiering": {
            "nvme": [{"path": str(args.path)}],
            "host_memory": args.host_memory if args.offload == "nvme" else "auto",
            "state_format": args.state_format,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--model", default="llama:4b", help="as `infinity train --model` takes it")
    parser.add_argument("--host-memory", type=parse_size, default=8 << 30)
    parser.add_argument("--offload", choices=["nvme", "cpu"], default="nvme", help="where the states live")
    parser.add_argument("--state-format", default="split")
    parser.add_argument("--length", type=int, default=128, help="tokens a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    start_s = time.perf_counter()
    torch.manual_seed(0)
    model, _ = build_model(args.model)
    engine, *_ = infinity.initialize(model=model, config=config(args))
    params = sum(param.numel() for param in model.parameters())
    facts: dict[str, Any] = {"model": args.model, "params": params, "init_s": time.perf_counter() - start_s}
    print(f"{params / 1e9:.2f}G parameters placed in {facts['init_s']:.0f} s", flush=True)
    texts = iter(batches(args.steps, args.length))
    facts["groups"] = groups = []
    facts["disk_bytes_per_s"] = rates = measured_rates(args)
    for count in group_sizes(args.steps):
        groups.append(train(engine, itertools.islice(texts, count)))
        rates += measured_rates(args)
    facts["tier_peak_bytes"] = engine.stats().peak_bytes
    facts["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine.close()  # after the drive was measured: removing the files keeps it busy
    print(report(facts))
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def measured_rates(args: argparse.Namespace) -> list[float]:
    """What the drive gives now, if the states are on one."""
    return [disk_bytes_per_s(args.path, runtime_s=_RATE_S)] if args.offload == "nvme" else []


def group_sizes(steps: int) -> list[int]:
    """The first two steps by themselves, which the tiers settle in, then four at a time."""
    settled = max(0, steps - _SETTLING)
    sizes = [min(steps, _SETTLING), *[_GROUP] * (settled // _GROUP), settled % _GROUP]
    return [size for size in sizes if size]


def train(engine: infinity.Engine, texts: Iterable[torch.Tensor]) -> dict[str, Any]:
    """One step a text; seconds and bytes include all that is in flight at the end."""
    steps = []
    first, first_s = sum(disk_bytes()), time.perf_counter()
    for ids in texts:
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
        steps.append(step)
        print(json.dumps(step), flush=True)
    engine.synchronize()
    return {"seconds": time.perf_counter() - first_s, "disk_bytes": sum(disk_bytes()) - first, "steps": steps}


def report(facts: dict[str, Any]) -> str:
    """Seconds a step when settled, against the disk's floor where there is one."""
    for group, around in zip(facts["groups"], itertools.pairwise(facts["disk_bytes_per_s"]), strict=False):
        group["floor_s"] = group["disk_bytes"] / statistics.mean(around)
    settled = facts["groups"][1:] or facts["groups"]
    count = sum(len(group["steps"]) for group in settled)
    facts["step_s"] = sum(group["seconds"] for group in settled) / count
    line = f"step {facts['step_s']:.1f} s"
    if facts["disk_bytes_per_s"]:
        facts["floor_s"] = sum(group["floor_s"] for group in settled) / count
        facts["ratio"] = facts["step_s"] / facts["floor_s"]
        parts = ", ".join(f"{group['seconds'] / group['floor_s']:.2f}" for group in settled)
        line += f", disk floor {facts['floor_s']:.1f} s, ratio {facts['ratio']:.2f} ({parts})"
    return f"{line}; peak RSS {facts['peak_rss_bytes'] / 1e9:.2f} GB"


if __name__ == "__main__":
    main()
