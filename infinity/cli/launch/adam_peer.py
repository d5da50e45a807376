"""DeepSpeedCPUAdam as a process: `adam_peer.py NUMEL`, then one step for every line on standard input.

It runs in an environment that has DeepSpeed but not infinity, so it imports no module of infinity.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module

import torch


def main() -> None:
    """Answer each line with the seconds of one step."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(int(sys.argv[1]), generator=generator))
    param.grad = torch.randn(param.numel(), generator=generator)
    adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam  # by name: type checkers have no DeepSpeed
    optimizer = adam([param], lr=1e-3, weight_decay=0.01, adamw_mode=True)
    for _ in sys.stdin:
        start_s = time.perf_counter()
        optimizer.step()
        print("seconds", time.perf_counter() - start_s, flush=True)


if __name__ == "__main__":
    main()
