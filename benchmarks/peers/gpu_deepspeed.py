"""Worker of gpu_step.py: DeepSpeed ZeRO-3 with offload; its CPU optimizer is compiled on first use."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch

from benchmarks.gpu_workload import (
    LR,
    WEIGHT_DECAY,
    arguments,
    decoder,
    device_of,
    measure,
    shape_of,
    token_ids,
)
from benchmarks.workload import be_the_only_rank, engine_step


def main() -> None:
    args = arguments().parse_args()
    device = device_of(args)
    be_the_only_rank()
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 100_000_000,
    }
    for name, home in (("offload_optimizer", args.offload_optimizer), ("offload_param", args.offload_param)):
        drive = {"nvme_path": str(args.nvme)} if home == "nvme" else {}
        if home != "none":
            zero[name] = {"device": home, "pin_memory": True, **drive}
    config = {
        "train_micro_batch_size_per_gpu": shape_of(args).batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": zero,
    }
    start_s = time.perf_counter()
    deepspeed.init_distributed()
    model = decoder(args, torch.device("cpu"))
    params = sum(param.numel() for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    step = engine_step(engine, token_ids(args, device))
    measure("deepspeed", args, device, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
