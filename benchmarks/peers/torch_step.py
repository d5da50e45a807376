"""Worker of train_step.py: a plain torch loop with everything in memory, bf16 weights and fp32 masters."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import GPT2LMHeadModel

from benchmarks.workload import LR, WEIGHT_DECAY, arguments, gpt2_config, measure, token_ids


def main() -> None:
    args = arguments().parse_args()
    start_s = time.perf_counter()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args)).bfloat16()
    weights = list(model.parameters())
    ids = token_ids(args)

    def compute() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if args.no_update:
            for weight in weights:
                weight.grad = None
        return loss

    params = sum(p.numel() for p in weights)
    if args.no_update:
        measure("compute", args, params, time.perf_counter() - start_s, compute)
        return
    masters = [p.detach().float().requires_grad_() for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> torch.Tensor:
        loss = compute()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        if args.clip:
            torch.nn.utils.clip_grad_norm_(masters, args.clip)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights, strict=True):
                weight.copy_(master)
        return loss

    measure("torch", args, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
