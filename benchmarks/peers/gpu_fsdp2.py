"""Worker of gpu_step.py: FSDP2 with CPUOffloadPolicy on one rank, weights and states in fp32, computing in bf16."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from benchmarks.gpu_workload import (
    LR,
    WEIGHT_DECAY,
    arguments,
    decoder,
    device_of,
    measure,
    token_ids,
    torch_step,
)
from benchmarks.workload import be_the_only_rank


def main() -> None:
    args = arguments().parse_args()
    device = device_of(args)
    on_card = device.type != "cpu"
    be_the_only_rank()
    start_s = time.perf_counter()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_card else "gloo")
    mesh = init_device_mesh(device.type, (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy() if on_card else OffloadPolicy()
    model = decoder(args, torch.device("cpu")).float()
    for each in [*model.model.layers, model]:
        fully_shard(each, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    params = sum(param.numel() for param in model.parameters())
    step = torch_step(model, optimizer, args, token_ids(args, device))
    measure("fsdp2", args, device, params, time.perf_counter() - start_s, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
