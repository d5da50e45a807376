"""Worker of versions.py: trains a few steps whenever it is told to, and says how long they took."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import GPT2LMHeadModel
from workload import LR, WEIGHT_DECAY, arguments, gpt2_config, token_ids

import infinity


def main() -> None:
    args = arguments().parse_args()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args))
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": args.offload},
            "offload_optimizer": {"device": args.offload},
        },
        "tiering": {"nvme": [{"path": str(args.nvme)}], "host_memory": args.host_memory},
    }
    ids = token_ids(args)
    with infinity.initialize(model=model, config=config)[0] as engine:
        for line in sys.stdin:
            start_s = time.perf_counter()
            for _ in range(int(line)):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
            engine.synchronize()  # the other has the machine now
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            told = {"s": time.perf_counter() - start_s, "loss": loss.item(), "rss_gb": peak_kib * 1024 / 1e9}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
