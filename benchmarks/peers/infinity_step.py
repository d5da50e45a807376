"""Worker of train_step.py: infinity."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import GPT2LMHeadModel

import infinity
from benchmarks.workload import arguments, engine_step, gpt2_config, infinity_config, measure, token_ids


def main() -> None:
    args = arguments().parse_args()
    start_s = time.perf_counter()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args))
    params = sum(p.numel() for p in model.parameters())
    ids = token_ids(args)
    with infinity.initialize(model=model, config=infinity_config(args))[0] as engine:
        step = engine_step(engine, ids)
        measure("infinity", args, params, time.perf_counter() - start_s, step, lambda: engine.stats().optimizer_s)


if __name__ == "__main__":
    main()
