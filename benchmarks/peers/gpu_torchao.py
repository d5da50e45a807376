"""Worker of gpu_step.py: torchao's CPUOffloadOptimizer, weights and states in bf16.

Gradients are offloaded, too, where they are not clipped: the norm needs them on the device.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torchao.optim import CPUOffloadOptimizer

from benchmarks.gpu_workload import LR, WEIGHT_DECAY, arguments, decoder, device_of, measure, token_ids, torch_step


def main() -> None:
    args = arguments().parse_args()
    device = device_of(args)
    start_s = time.perf_counter()
    model = decoder(args, device)
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=not args.clip,
        fused=True,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
    )
    params = sum(param.numel() for param in model.parameters())
    step = torch_step(model, optimizer, args, token_ids(args, device))
    measure("torchao", args, device, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
