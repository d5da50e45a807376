"""Worker of gpu_step.py: torch's AdamW with everything on the device, weights and states in bf16.

It keeps fewer bits than the others, which have fp32 states, and moves nothing: a ceiling.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.gpu_workload import LR, WEIGHT_DECAY, arguments, decoder, device_of, measure, token_ids, torch_step


def main() -> None:
    args = arguments().parse_args()
    device = device_of(args)
    start_s = time.perf_counter()
    model = decoder(args, device)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=fused, foreach=False)
    params = sum(param.numel() for param in model.parameters())
    step = torch_step(model, optimizer, args, token_ids(args, device))
    measure("torch", args, device, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
