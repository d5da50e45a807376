"""Writes the checkpoints of tests/checkpoint/data/deepspeed: DeepSpeed trains a small model on the CPU and saves it.

Needs an environment with deepspeed beside torch and safetensors; nothing is compiled. One process a rank:

    torchrun --nproc-per-node 2 benchmarks/peers/deepspeed_checkpoints.py --stage 3 --precision bf16 DIRECTORY

`DIRECTORY/stage3-bf16-2` is then a directory of checkpoints; beside them lie `expected.safetensors`, the values that
the checkpoint must have by DeepSpeed's own account, and `losses.json`, of all steps, those after it too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

from tests.checkpoint.deepspeed_model import AFTER, BEFORE, config, data, groups, small


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--aligned", action="store_true", help="with zero_optimization.parameter_alignment")
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    if args.precision == "fp16":  # which torch computes in on a CPU, and DeepSpeed does not ask it
        get_accelerator().supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
        get_accelerator().is_fp16_supported = lambda: True
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    target = args.directory / f"stage{args.stage}-{args.precision}-{ranks}{'-aligned' if args.aligned else ''}"
    model, settings = small(), config(args.stage, args.precision, ranks)
    if args.aligned:
        settings["zero_optimization"]["parameter_alignment"] = True
    engine = deepspeed.initialize(model=model, config=settings, model_parameters=groups(model))[0]
    losses, scales = [], []
    for index, ids in enumerate(data(BEFORE + AFTER)):
        if index == BEFORE:
            engine.save_checkpoint(str(target), client_state={"epoch": 7, "seen": torch.arange(3)})
            expected = _values(engine, model)
            if rank == 0:
                save_file(expected, target / "expected.safetensors")
        loss = engine(ids.chunk(ranks)[rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone().float()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
        scales.append(engine.optimizer.cur_scale)
    if rank == 0:
        about = {
            "losses": losses,
            "loss_scales": scales,
            "deepspeed": deepspeed.__version__,
            "torch": torch.__version__,
        }
        (target / "losses.json").write_text(json.dumps(about) + "\n")
        for script in target.glob("**/zero_to_*.py"):
            script.unlink()


def _values(engine: deepspeed.DeepSpeedEngine, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every master, moment and frozen parameter, whole."""
    found = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            found[f"master.{name}"] = safe_get_full_fp32_param(param)
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{moment}.{name}"] = _moment(engine, param, moment)
        elif hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters([param]):
                found[f"param.{name}"] = param.detach().float().clone()
        else:
            found[f"param.{name}"] = param.detach().float().clone()
    return {name: value.detach().reshape(-1).contiguous().clone() for name, value in found.items()}


def _moment(engine: deepspeed.DeepSpeedEngine, param: Any, moment: str) -> torch.Tensor:
    """As its map has it: at stages 1 and 2 its accessor finds no moments of torch's optimizers."""
    if hasattr(param, "ds_id"):
        return safe_get_full_optimizer_state(param, moment)
    zero = engine.optimizer
    whole = torch.zeros(param.numel())
    for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        if any(param is other for other in group) and param._hp_mapping is not None:
            here, there = param._hp_mapping.lp_fragment_address, param._hp_mapping.hp_fragment_address
            state = zero.optimizer.state[flat][moment]
            whole[here.start : here.start + here.numel] = state[there.start : there.start + there.numel]
    torch.distributed.all_reduce(whole)
    return whole


if __name__ == "__main__":
    main()
