"""Worker of versions.py: trains a few steps whenever it is told to, and says how long they took.

Under torchrun the first rank is told, and tells the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

import infinity
from benchmarks.peers.wide_matmul import multiply_in_fp32
from benchmarks.workload import arguments, gpt2_config, infinity_config, token_ids


def told(*, first: bool) -> Iterator[int]:
    """How many steps to train, again and again."""
    while True:
        line = sys.stdin.readline() if first else ""
        steps = torch.tensor([int(line) if line else 0])
        if dist.is_initialized():
            dist.broadcast(steps, 0)
        if not steps.item():
            return
        yield int(steps.item())


def main() -> None:
    args = arguments().parse_args()
    if args.wide_matmul:
        multiply_in_fp32()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args))
    ids = token_ids(args)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    with infinity.initialize(model=model, config=infinity_config(args))[0] as engine:
        for steps in told(first=first):
            start_s = time.perf_counter()
            for _ in range(steps):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
            engine.synchronize()  # the other has the machine now
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if first:
                row = {"s": time.perf_counter() - start_s, "loss": loss.item(), "rss_gb": peak_kib * 1024 / 1e9}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
