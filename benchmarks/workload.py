"""The training step that `train_step.py` times, told the same way to every system.

Imported by the worker of each system in its own virtual environment: only torch and transformers here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config

LR, WEIGHT_DECAY = 1e-4, 0.01


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--offload", choices=["none", "cpu", "nvme"], default="nvme")
    parser.add_argument("--nvme", type=Path, default=Path())
    parser.add_argument("--host-memory", default="auto", help="budget of infinity, for example 1GiB")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--schedule", default="auto", help="tiering.update_schedule of infinity")
    parser.add_argument("--wide-matmul", type=int, default=0, help="1: multiply bf16 in fp32, see peers/wide_matmul.py")
    parser.add_argument("--no-update", action="store_true", help="torch alone: forward and backward, and no optimizer")
    return parser


def worker_options(args: argparse.Namespace) -> list[str]:
    """The options of `arguments` as a worker's command line."""
    names = set(vars(arguments().parse_args([]))) - {"no_update"}
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in sorted(names)]


def gpt2_config(args: argparse.Namespace) -> GPT2Config:
    return GPT2Config(  # type: ignore[call-arg]  # its stub has no attn_implementation
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=args.hidden // 64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        attn_implementation="eager" if args.wide_matmul else None,  # products that can be widened
    )


def infinity_config(args: argparse.Namespace) -> dict[str, object]:
    """The configuration of infinity's workers."""
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": args.offload},
            "offload_optimizer": {"device": args.offload},
        },
        "tiering": {
            "nvme": [{"path": str(args.nvme)}],
            "host_memory": args.host_memory,
            "update_schedule": args.schedule,
        },
    }


def token_ids(args: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, GPT2Config().vocab_size, (args.batch, args.seq), generator=generator)


def engine_step(engine: Any, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step of an engine with DeepSpeed's calls."""

    def step() -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss

    return step


def be_the_only_rank() -> None:
    """Set the environment in which `torch.distributed` starts with one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def disk_bytes() -> tuple[int, int]:
    """(read, written) by this process at the block layer so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def status_bytes(key: str) -> int:
    """A line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure(
    system: str,
    args: argparse.Namespace,
    params: int,
    init_s: float,
    step: Callable[[], torch.Tensor],
    optimizer_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """Run the steps and print one JSON line.

    Args:
        step: one whole update; returns the loss.
        optimizer_s: seconds that the optimizer ran beside the last step's computation.
    """
    seconds, reads, writes, losses, optimizer = [], [], [], [], []
    for _ in range(args.warmup + args.steps):
        read_before, written_before = disk_bytes()
        start_s = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - start_s)
        optimizer.append(optimizer_s())
        read, written = disk_bytes()
        reads.append((read - read_before) / params)
        writes.append((written - written_before) / params)
    kept = slice(args.warmup, None)
    line = {
        "system": system,
        "offload": args.offload,
        "params": params,
        "tokens": args.batch * args.seq,
        "step_s": statistics.median(seconds[kept]),
        "step_min_s": min(seconds[kept]),
        "step_max_s": max(seconds[kept]),
        "read_bytes_per_param": statistics.median(reads[kept]),
        "write_bytes_per_param": statistics.median(writes[kept]),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "optimizer_s": statistics.median(optimizer[kept]),
        "init_s": init_s,
        "losses": losses,
    }
    print("RESULT " + json.dumps(line), flush=True)
