"""A schedule of torch.distributed.pipelining drives stages whose states infinity holds."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import infinity
from tests.behaviour.ranks import run_ranks

WIDTH, LAYERS, BATCH, MICRO_BATCHES, STEPS, LR = 32, 4, 8, 4, 4, 1e-3


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(LAYERS))
    )


def global_batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(1)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.roll(1, -1)).square().mean()


def train_plainly() -> dict[str, torch.Tensor]:
    model = make_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for x in global_batches():
        loss_of(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def train_stage(schedules: list[type[Any]], swap: str) -> list[dict[str, torch.Tensor]]:
    """This rank's stage of a pipeline of two, by schedule."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
    return [train_with(mesh, schedule, swap) for schedule in schedules]


def train_with(mesh: Any, schedule_class: type[Any], swap: str) -> dict[str, torch.Tensor]:
    index, rank, ranks = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    half = LAYERS // 2
    module = nn.Sequential(*list(make_layers())[index * half : (index + 1) * half])
    device = {"device": "nvme", "nvme_path": swap}
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,  # the norm would be the stage's
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
    }
    with infinity.initialize(model=module, config=config, process_group=mesh["dp"].get_group())[0] as engine:
        stage = PipelineStage(engine.module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = schedule_class(
            stage, MICRO_BATCHES, loss_fn=lambda output, x: engine.scale(loss_of(output, x)), scale_grads=False
        )
        for batch in global_batches():
            x = batch.chunk(ranks)[rank]
            with engine.driven_step():
                schedule.step(*([x] if index == 0 else []), **({"target": x} if index == 1 else {}))
        return {
            f"{int(name.split('.')[0]) + index * half}.{name.split('.', 1)[1]}": values
            for name, values in engine.named_parameters()
        }


needs_scale_grads = pytest.mark.skipif(
    "scale_grads" not in inspect.signature(ScheduleGPipe.__init__).parameters,
    reason="before torch 2.7 a pipeline's schedule cannot be told to leave gradients unscaled",
)


@needs_scale_grads
def test_two_stages_follow_the_plain_loop(tmp_path) -> None:
    """Alone and on two ranks each."""
    expected = train_plainly()
    for ranks in (2, 4):
        path = tmp_path / str(ranks)
        (path / "swap").mkdir(parents=True)
        by_rank = run_ranks(ranks, train_stage, [ScheduleGPipe, Schedule1F1B], str(path / "swap"), path=path)
        for first, second in zip(by_rank[0], by_rank[1], strict=True):
            trained = first | second
            assert trained.keys() == expected.keys()
            for name, weight in expected.items():
                torch.testing.assert_close(
                    trained[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
                )
