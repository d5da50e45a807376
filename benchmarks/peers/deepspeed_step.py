"""Worker of train_step.py: DeepSpeed ZeRO-3 on the CPU accelerator, in the configuration that works for it.

Needs an environment with deepspeed, ninja and libaio's headers; its operators are compiled on first use.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from transformers import GPT2LMHeadModel

from benchmarks.workload import (
    LR,
    WEIGHT_DECAY,
    arguments,
    be_the_only_rank,
    engine_step,
    gpt2_config,
    measure,
    token_ids,
)


def main() -> None:
    args = arguments().parse_args()
    be_the_only_rank()
    start_s = time.perf_counter()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args))
    sizes = [p.numel() for p in model.parameters()]
    nvme = {"device": "nvme", "nvme_path": str(args.nvme), "pin_memory": True}
    other = {"device": args.offload}
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1_000_000_000,
            "stage3_param_persistence_threshold": 10_000,
            "offload_optimizer": {**nvme, "buffer_count": 5, "pipeline_read": True, "pipeline_write": True}
            if args.offload == "nvme"
            else other,
            # parameters stay in memory (max_in_cpu): with all of them on disk this size does not run
            "offload_param": {
                **nvme,
                "buffer_count": 40,
                "buffer_size": int(max(sizes) * 1.05),
                "max_in_cpu": 1_000_000_000,
            }
            if args.offload == "nvme"
            else other,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "overlap_events": True,
            "single_submit": False,
            "intra_op_parallelism": 2,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    step = engine_step(engine, token_ids(args))
    measure("deepspeed", args, sum(sizes), time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
