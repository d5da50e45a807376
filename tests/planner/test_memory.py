"""Estimated bytes are those that an engine takes, and what is not there is refused in words."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from torch import nn

import infinity
from infinity.config import load_config
from infinity.planner import (
    Drive,
    Duplex,
    Machine,
    Rates,
    TrainingPlan,
    Work,
    count_work,
    drives_here,
    estimate,
    largest_model,
    plan_training,
    predict_step,
    problems,
)
from infinity.zero.budgets import free_for_swap
from tests.behaviour.reference import SEQ, Placement, Recipe, batches, tiny_gpt2, tiny_llama, train_on


@pytest.mark.parametrize(
    ("host_memory", "clipping"), [(800_000, 0.5), (2_000_000, 0.0), (2_000_000, 0.5), (None, 0.0), (None, 0.5)]
)
@pytest.mark.parametrize(("params", "optimizer"), [("nvme", "nvme"), ("none", "nvme"), ("none", "none")])
def test_the_tiers_hold_what_was_estimated(params, optimizer, host_memory, clipping, tmp_path) -> None:
    values = Recipe("bf16", clipping=clipping).config(Placement(params, optimizer, tmp_path, "64KiB", host_memory))
    config = load_config(values)
    try:
        plan = plan_training(tiny_llama(), config)
    except infinity.CapacityError:
        with pytest.raises(infinity.CapacityError):
            infinity.initialize(model=tiny_llama(), config=values)
        return
    needs = estimate(plan, None, 0)
    with infinity.initialize(model=tiny_llama(), config=values)[0] as engine:
        train_on(engine, batches(4))
        peak = engine.stats().peak_bytes
    assert peak["nvme"] == needs.nvme_bytes
    assert 0.95 * needs.budget_bytes <= peak["host"] <= needs.budget_bytes


CPU = Machine()


def test_gradients_that_never_wait_take_no_more_than_one_unit_has(tmp_path) -> None:
    """How many wait follows from the rates; what is asked for is what they may take, whatever the rates."""
    config, plan, least_known = facts(tmp_path, host_memory=500_000)
    work = count_work(tiny_llama(), plan, 1, SEQ)
    products = {"nn": ((1, 1e6),)}
    taken = {}
    for name, disk_rate in (("fast", 1e12), ("slow", 1e3)):
        rates = Rates(products=products, disk=Duplex(disk_rate, disk_rate, disk_rate), optimizer_params_per_s=1e12)
        step = predict_step(plan, config, work, rates)
        needs = estimate(plan, work, 100, step)
        assert needs.granted_bytes == least_known.granted_bytes
        taken[name] = needs.budget_bytes
    assert taken["fast"] < taken["slow"] <= least_known.budget_bytes


def facts(tmp_path, machine: Machine = CPU, host_memory: int = 2_000_000):
    config = load_config(Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB", host_memory)))
    plan = plan_training(tiny_llama(), config, machine)
    work = count_work(tiny_llama(), plan, 1, SEQ)
    return config, plan, estimate(plan, work, 100)


def test_a_gradient_that_several_modules_add_up_is_there_three_times(tmp_path) -> None:
    """That of the first module that backward comes to, that of the last, and their sum."""
    config = load_config(Recipe("fp32").config(Placement("nvme", "nvme", tmp_path, "64KiB")))
    needs = {}
    for name, make in (("tied", tiny_gpt2), ("apart", tiny_llama)):
        model = make()
        plan = plan_training(model, config)
        work = count_work(model, plan, 1, SEQ)
        needs[name] = estimate(plan, work, 0), plan, work
    tied, plan, work = needs["tied"]
    units = plan.sizing.partition.units
    embedding, block = (
        next(unit.trainable_numel * 4 for unit in units if name in unit.name) for name in ("wte", "transformer.h.0")
    )
    assert tied.unit_grad_bytes == max(block + embedding, 3 * embedding)
    assert tied.process_bytes - tied.budget_bytes == max(
        int(work.activation_bytes) + block + embedding, 3 * embedding
    ), "activations are gone when backward comes to the embedding"
    apart, plan, work = needs["apart"]
    assert apart.unit_grad_bytes == max(unit.trainable_numel * 4 for unit in plan.sizing.partition.units)
    assert apart.process_bytes - apart.budget_bytes == int(work.activation_bytes) + apart.unit_grad_bytes


def test_what_is_there_is_no_problem(tmp_path) -> None:
    _, plan, needs = facts(tmp_path)
    assert list(problems(plan, needs, [Drive("/a", needs.nvme_bytes)], needs.process_bytes)) == []


def test_too_little_of_each_tier_is_said_with_the_numbers(tmp_path) -> None:
    _, plan, needs = facts(tmp_path, Machine(2, 2, device_bytes=1 << 30), 1_000_000)
    small = Machine(2, 2, device_bytes=needs.device_bytes - 1)
    plan = type(plan)(**{**vars(plan), "machine": small})
    drives = [Drive("/a", needs.nvme_bytes), Drive("/b", 4096)]
    assert needs.nvme_bytes > 4096
    disk, host, device = problems(plan, needs, drives, 2 * needs.process_bytes - 1)
    assert "/b has 4.00 KiB" in disk
    assert "Free " in disk
    assert "the processes of a machine take" in host
    assert "device memory is too small" in device


def test_drives_that_are_one_count_once(tmp_path) -> None:
    values = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    values["tiering"]["nvme"] = [{"path": str(tmp_path / name), "capacity": 4096} for name in ("one", "two")]
    drives = drives_here(load_config(values))
    assert [drive.free_bytes for drive in drives] == [2 * 4096]
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_what_dead_runs_have_left_is_free_for_a_new_one(tmp_path, monkeypatch) -> None:
    values = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    left = tmp_path / "infinity-r0-1-0.swap.new"
    left.touch()
    os.utime(left, (0, 0))
    found = [Drive("/a", 1), Drive("/b", 2)]
    monkeypatch.setattr("infinity.zero.budgets.drives_here", lambda config: [] if left.exists() else found)
    assert free_for_swap(load_config(values)) == 3


@pytest.mark.parametrize(
    ("room", "schedule"),
    [({}, "speculative"), ({"drive_bytes": 1 << 30}, "speculative"), ({"drive_bytes": 1}, "deferred")],
)
def test_updates_are_speculative_where_the_drives_have_room_for_it(room, schedule, tmp_path) -> None:
    clipped = load_config(Recipe("bf16", clipping=1.0).config(Placement("nvme", "nvme", tmp_path, "64KiB")))
    machine = Machine(device_bytes=1 << 30, **room)
    assert plan_training(tiny_llama(), clipped, machine).sizing.schedule.value == schedule
    here = replace(machine, device_bytes=None)
    assert plan_training(tiny_llama(), clipped, here).sizing.schedule.value == "deferred"
    several = replace(machine, ranks=2, neighbours=2)
    assert plan_training(tiny_llama(), clipped, several).sizing.schedule.value == "deferred"


def count_short(model: nn.Module, plan: TrainingPlan) -> Work:
    return count_work(model, plan, 1, 128)


def test_the_largest_model_fits_and_a_larger_one_does_not(tmp_path) -> None:
    config = load_config(Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "1MiB", "1GiB")))
    drives = [Drive("/a", 2 << 30)]
    shape = largest_model(config, Machine(), drives, 4 << 30, count_short, 0)
    assert shape is not None
    assert 2 << 30 < 12 * shape.params < 3 << 30, "on the drive and in host memory"
    assert largest_model(config, Machine(), [], 4 << 30, count_short, 0) is None
    less = largest_model(config, Machine(), drives, 1 << 30, count_short, 0)
    assert less is not None
    assert less.params < shape.params, "activations have no room beside the budget"
