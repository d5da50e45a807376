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
from wide_matmul import multiply_in_fp32
from workload import arguments, gpt2_config, infinity_config, token_ids

import infinity


def main() -> None:
    args = arguments().parse_args()
    if args.wide_matmul:
        multiply_in_fp32()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2_config(args))
    ids = token_ids(args)
    with infinity.initialize(model=model, config=infinity_config(args))[0] as engine:
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
