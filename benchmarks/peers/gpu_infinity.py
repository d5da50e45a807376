"""Worker of gpu_step.py: infinity."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import infinity
from benchmarks.gpu_workload import (
    LR,
    WEIGHT_DECAY,
    arguments,
    decoder,
    device_of,
    fill,
    measure,
    shape_of,
    token_ids,
)
from benchmarks.workload import engine_step


def main() -> None:
    args = arguments().parse_args()
    device = device_of(args)
    config = {
        "train_micro_batch_size_per_gpu": shape_of(args).batch,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": args.offload_param},
            "offload_optimizer": {"device": args.offload_optimizer},
        },
        "tiering": {
            "nvme": [{"path": str(args.nvme)}],
            "host_memory": args.host_memory,
            "update_schedule": args.schedule,
        },
    }
    ids = token_ids(args, device)
    start_s = time.perf_counter()
    model = decoder(args)
    params = sum(param.numel() for param in model.parameters())
    with infinity.initialize(model=model, config=config, init_function=fill, device=str(device))[0] as engine:
        step = engine_step(engine, ids)
        measure("infinity", args, device, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
