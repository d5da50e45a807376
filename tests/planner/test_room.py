"""What `auto` picks leaves room for what the process takes beside it, so that `estimate` does not refuse it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from infinity.config import Config, load_config
from infinity.planner import (
    Drive,
    Machine,
    Shape,
    TrainingPlan,
    Work,
    count_work,
    estimate,
    largest_model,
    plan_training,
    plan_with_room,
    problems,
    shape_of,
    stand_in,
)

GIB = 1 << 30
LIBRARIES = 400 << 20
DRIVES = [Drive("/a", 300 * GIB)]


def auto_config(tmp_path, ranks: int = 1) -> Config:
    nvme = {"device": "nvme"}
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "tiering": {"nvme": [{"path": str(tmp_path)}]},
    }
    return load_config(values, world_size=ranks)


def count(model: nn.Module, plan: TrainingPlan) -> Work:
    return count_work(model, plan.sizing.partition, torch.bfloat16, 1, 1024)


def refused(shape: Shape, config: Config, machine: Machine, host_bytes: int) -> list[str]:
    model = stand_in(shape)
    free_bytes = host_bytes - LIBRARIES * machine.neighbours
    _, plan, work = plan_with_room(model, config, machine, lambda plan: count(model, plan), free_bytes)
    return list(problems(plan, estimate(plan, work, LIBRARIES), DRIVES, host_bytes))


@pytest.mark.parametrize("gib", [16, 24, 64, 1000])
def test_an_auto_budget_is_never_refused_where_one_by_hand_would_pass(gib, tmp_path) -> None:
    config = auto_config(tmp_path)
    machine = Machine(host_bytes=gib * GIB)
    shape = shape_of(8e9)
    assert refused(shape, config, machine, gib * GIB) == []
    by_hand = replace(config, tiering=replace(config.tiering, host_memory_bytes=8 * GIB))
    assert refused(shape, by_hand, machine, gib * GIB) == []


def test_a_device_budget_leaves_room_for_activations(tmp_path) -> None:
    config = auto_config(tmp_path)
    machine = Machine(device_bytes=8 * GIB, host_bytes=64 * GIB)
    model = stand_in(shape_of(4e9))
    plain = plan_training(model, config, machine)
    assert any(problems(plain, estimate(plain, count(model, plain), LIBRARIES), DRIVES, 64 * GIB))
    assert refused(shape_of(4e9), config, machine, 64 * GIB) == []


def test_what_fits_is_left_as_it_is(tmp_path) -> None:
    config = auto_config(tmp_path)
    model = stand_in(shape_of(2e7))
    same, _, _ = plan_with_room(model, config, Machine(host_bytes=64 * GIB), lambda plan: count(model, plan), 63 * GIB)
    assert same is config


# name: ranks on the machine, device memory in GiB or None for the CPU, host memory in GiB
MACHINES = {
    "4090": (1, 24, 64),
    "3090 with little memory": (1, 24, 24),
    "L40S": (1, 48, 512),
    "A100": (1, 80, 512),
    "H100": (1, 80, 512),
    "H200": (1, 141, 512),
    "2 x 4090": (2, 24, 128),
    "8 x H100": (8, 80, 2000),
    "laptop of 16 GB": (1, None, 15),
    "laptop of 8 GB": (1, None, 7),
    "container of 4 GB": (1, None, 4),
    "server of 1 TB": (1, None, 1000),
}


@pytest.mark.parametrize("name", MACHINES)
def test_the_largest_model_is_accepted(name, tmp_path) -> None:
    ranks, device, host = MACHINES[name]
    machine = Machine(ranks, ranks, None if device is None else device * GIB, host * GIB)
    config = auto_config(tmp_path, ranks)
    shape = largest_model(config, machine, DRIVES, host * GIB, count, LIBRARIES)
    assert shape is not None
    assert refused(shape, config, machine, host * GIB) == []
