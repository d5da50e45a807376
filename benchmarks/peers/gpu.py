"""Workers of gpu_step.py, one for each system: `gpu.py SYSTEM OPTIONS`.

`torch` is torch's AdamW with everything on the device, weights and states in bf16: it keeps fewer bits than the others,
which have fp32 states, and moves nothing, so it is a ceiling. `torchao` also has weights and states in bf16. `fsdp2`
has them in fp32 and computes in bf16. `deepspeed` compiles its CPU optimizer on first use.
"""

# ruff: noqa: PLC0415  (a system imports its own package, which may be missing)

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

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
    torch_step,
)
from benchmarks.workload import be_the_only_rank, engine_step

Started = tuple[float, Callable[[], torch.Tensor]]  # when it began, without imports; and a step
ADAM: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY}


@contextmanager
def infinity(args: argparse.Namespace, device: torch.device) -> Iterator[Started]:
    from infinity import initialize

    config = {
        "train_micro_batch_size_per_gpu": shape_of(args).batch,
        "gradient_clipping": args.clip,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
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
    start_s = time.perf_counter()
    model = decoder(args)
    with initialize(model=model, config=config, init_function=fill, device=str(device))[0] as engine:
        yield start_s, engine_step(engine, token_ids(args, device))


@contextmanager
def plain_torch(args: argparse.Namespace, device: torch.device) -> Iterator[Started]:
    start_s = time.perf_counter()
    model = decoder(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=device.type == "cuda", foreach=False)
    yield start_s, torch_step(model, optimizer, args, token_ids(args, device))


@contextmanager
def torchao(args: argparse.Namespace, device: torch.device) -> Iterator[Started]:
    from torchao.optim import CPUOffloadOptimizer

    start_s = time.perf_counter()
    model = decoder(args, device)
    offloads = not args.clip  # the norm needs gradients on the device
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=offloads, fused=True, **ADAM
    )
    yield start_s, torch_step(model, optimizer, args, token_ids(args, device))


@contextmanager
def fsdp2(args: argparse.Namespace, device: torch.device) -> Iterator[Started]:
    """With CPUOffloadPolicy on one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

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
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM, fused=True)
    yield start_s, torch_step(model, optimizer, args, token_ids(args, device))
    dist.destroy_process_group()


@contextmanager
def deepspeed(args: argparse.Namespace, device: torch.device) -> Iterator[Started]:
    """ZeRO-3 with offload."""
    from deepspeed import init_distributed, initialize

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
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": zero,
    }
    start_s = time.perf_counter()
    init_distributed()
    model = decoder(args, torch.device("cpu"))
    engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
    yield start_s, engine_step(engine, token_ids(args, device))


SYSTEMS = {"infinity": infinity, "torch": plain_torch, "torchao": torchao, "fsdp2": fsdp2, "deepspeed": deepspeed}


def main() -> None:
    system = sys.argv.pop(1)
    args = arguments().parse_args()
    device = device_of(args)
    params = sum(param.numel() for param in decoder(args).parameters())
    with SYSTEMS[system](args, device) as (start_s, step):
        measure(system, args, device, params, time.perf_counter() - start_s, step)


if __name__ == "__main__":
    main()
