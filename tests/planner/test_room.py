"""What `auto` picks leaves room for what the process takes beside it, so that `estimate` does not refuse it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from torch import nn

from infinity.config import Config, load_config
from infinity.errors import CapacityError
from infinity.planner import (
    Drive,
    Machine,
    Shape,
    TrainingPlan,
    Work,
    count_work,
    decoder_of,
    estimate,
    largest_model,
    plan_training,
    plan_with_room,
    problems,
    shape_of,
)
from infinity.planner.decoder import usual_shape
from infinity.planner.memory import Count
from infinity.planner.work import Pass

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
    return count_work(model, plan, 1, 1024)


def refused(
    shape: Shape, config: Config, machine: Machine, drives: list[Drive], host_bytes: int, count: Count = count
) -> list[str]:
    model = decoder_of(shape)
    free_bytes = host_bytes - LIBRARIES * machine.neighbours
    try:
        _, plan, work = plan_with_room(model, config, machine, lambda plan: count(model, plan), free_bytes)
    except CapacityError as error:
        return [str(error)]
    return list(problems(plan, estimate(plan, work, LIBRARIES), drives, host_bytes))


@pytest.mark.parametrize("gib", [16, 24, 64, 1000])
def test_an_auto_budget_is_never_refused_where_one_by_hand_would_pass(gib, tmp_path) -> None:
    config = auto_config(tmp_path)
    machine = Machine(host_bytes=gib * GIB)
    shape = shape_of(8e9)
    assert refused(shape, config, machine, DRIVES, gib * GIB) == []
    by_hand = replace(config, tiering=replace(config.tiering, host_memory_bytes=8 * GIB))
    assert refused(shape, by_hand, machine, DRIVES, gib * GIB) == []


def test_a_device_budget_leaves_room_for_activations(tmp_path) -> None:
    config = auto_config(tmp_path)
    machine = Machine(device_bytes=8 * GIB, host_bytes=64 * GIB)
    model = decoder_of(shape_of(4e9))
    plain = plan_training(model, config, machine)
    assert any(problems(plain, estimate(plain, count(model, plain), LIBRARIES), DRIVES, 64 * GIB))
    assert refused(shape_of(4e9), config, machine, DRIVES, 64 * GIB) == []


@pytest.mark.parametrize("gib", [20, 40])
def test_what_is_needed_on_a_device_that_is_too_small_counts_with_the_least_budget(gib, tmp_path) -> None:
    """The whole device and the activations together would be said to be needed else: almost twice as much."""
    config, shape = auto_config(tmp_path), shape_of(2e9)

    def count(model: nn.Module, plan: TrainingPlan) -> Work:
        return Work(1024, Pass(), Pass(), gib * GIB, 0.0, 0.0)

    [problem] = refused(shape, config, Machine(device_bytes=20 * GIB, host_bytes=64 * GIB), DRIVES, 64 * GIB, count)
    needed = float(re.findall(r"too small: ([0-9.]+) GiB are needed", problem)[0])
    assert "tiering.device_memory" not in problem, "it is as low as it can be"
    for card, problems_there in ((needed - 0.1, 1), (needed + 0.1, 0)):
        machine = Machine(device_bytes=int(card * GIB), host_bytes=64 * GIB)
        assert len(refused(shape, config, machine, DRIVES, 64 * GIB, count)) == problems_there


@pytest.mark.parametrize(("gib", "accepted"), [(0.1, True), (4, False)])
def test_the_share_that_auto_leaves_free_is_used_if_activations_leave_room(gib, accepted, tmp_path) -> None:
    """All states are in host memory, and need 85% of it."""
    cpu = {"device": "cpu"}
    values = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": cpu, "offload_optimizer": cpu},
    }
    config, shape = load_config(values), shape_of(1e9)
    host_bytes = int(plan_training(decoder_of(shape), config, Machine(host_bytes=64 * GIB)).needs.least_bytes / 0.85)
    machine = Machine(host_bytes=host_bytes)
    with pytest.raises(CapacityError):
        plan_training(decoder_of(shape), config, machine)

    def count(model: nn.Module, plan: TrainingPlan) -> Work:
        return Work(1024, Pass(), Pass(), int(gib * GIB), 0.0, 0.0)

    found = refused(shape, config, machine, [], host_bytes, count)
    assert [problem.partition(":")[0] for problem in found] == ([] if accepted else ["host memory is too small"])


def test_what_fits_is_left_as_it_is(tmp_path) -> None:
    config = auto_config(tmp_path)
    model = decoder_of(shape_of(2e7))
    same, _, _ = plan_with_room(model, config, Machine(host_bytes=64 * GIB), lambda plan: count(model, plan), 63 * GIB)
    assert same is config


# name: ranks on the machine, device memory in GiB or None for the CPU, host memory and free space on drives in GiB
MACHINES = {
    "RTX 4090": (1, 23.5, 64, 1862),
    "RTX 4090 with 128 GB": (1, 23.5, 128, 1862),
    "RTX 5090": (1, 31.4, 192, 1862),
    "L40S": (1, 44.4, 256, 1862),
    "A100 of 40 GB": (1, 39.4, 128, 1862),
    "H100": (1, 79.2, 1024, 3725),
    "H200": (1, 139, 1500, 3725),
    "4 x H100": (4, 79.2, 2048, 3725),
    "8 x H100": (8, 79.2, 2048, 3725),
    "laptop of 16 GB": (1, None, 15, 465),
    "laptop of 32 GB with a card": (1, 7.6, 31, 465),
    "container of 2 GiB": (1, None, 2, 93),
    "container of 700 MiB": (1, None, 0.68, 93),
}
STEPS = list(itertools.product((2048, 8192), (0.0, 1.0), (False, True)))


def counted(model: nn.Module, tokens: int, *, checkpointing: bool) -> Work:
    """About what `count_work` counts for a decoder, in less time."""
    layers, width = len(model.blocks), model.norm.normalized_shape[0]
    inputs, inside, logits = 2 * width * tokens, 32 * width * tokens, 4 * 50257 * tokens
    saved = inputs * layers if checkpointing else inside * layers
    return Work(tokens, Pass(), Pass(), saved + 1.5 * logits, inside if checkpointing else 0.0, 2.0 * logits)


@pytest.mark.parametrize(("name", "step"), list(zip(MACHINES, itertools.cycle(STEPS), strict=False)))
def test_the_largest_model_is_accepted_and_the_next_one_refused(name, step, tmp_path) -> None:
    ranks, device, host, drive = MACHINES[name]
    tokens, clipping, checkpointing = step
    host_bytes, drives = int(host * GIB), [Drive("/a", drive * GIB)]
    machine = Machine(ranks, ranks, device and int(device * GIB), host_bytes, drives[0].free_bytes)
    config = replace(auto_config(tmp_path, ranks), gradient_clipping=clipping)
    if host > 16:  # few tiles, so that a plan takes little time
        config = replace(config, tiering=replace(config.tiering, tile_size_bytes=int(host) << 23))

    def count(model: nn.Module, plan: TrainingPlan) -> Work:
        return counted(model, tokens, checkpointing=checkpointing)

    asked = config, machine, drives
    shape = largest_model(*asked, host_bytes, count, LIBRARIES)
    if shape is not None:
        assert refused(shape, *asked, host_bytes, count) == []
    least_params = 0 if shape is None else 1.05 * shape.params
    larger = next(larger for larger in map(usual_shape, itertools.count()) if larger.params > least_params)
    assert refused(larger, *asked, int(0.98 * host_bytes), count), "the search leaves a little of the host's memory"
