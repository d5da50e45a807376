"""Predicted steps on machines whose numbers make the answer known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import infinity
from infinity.config import Config, load_config
from infinity.planner import (
    Duplex,
    Machine,
    Rates,
    Shape,
    StepTime,
    TrainingPlan,
    count_work,
    decoder_of,
    plan_training,
    predict_step,
    rates_of,
    with_numbers,
)
from infinity.planner.step_time import speeds_of
from infinity.planner.work import Pass, Product

SHAPE = Shape(6, 128, 1024)
CPU = Machine()


def config_of(**more: Any) -> Config:
    values = {
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme"},
            "offload_optimizer": {"device": "nvme"},
            "stage3_param_persistence_threshold": 0,
        },
        "tiering": {"nvme": [{"path": "."}], "tile_size": "64KiB"},
    }
    return load_config(values | more, world_size=2)


def predicted(rates: Rates, machine: Machine = CPU, seq: int = 64, **more: Any) -> tuple[TrainingPlan, StepTime]:
    config = config_of(**more)
    model = decoder_of(SHAPE)
    plan = plan_training(model, config, machine)
    work = count_work(model, plan, 1, seq)
    return plan, predict_step(plan, config, work, rates)


def numbers(**rates: float) -> Rates:
    fast = {"flop_per_s": 1e30, "optimizer_params_per_s": 1e30, "disk_bytes_per_s": 1e30}
    return with_numbers(Rates(), **(fast | rates))


def least_budget(**more: Any) -> dict[str, Any]:
    needs = plan_training(decoder_of(SHAPE), config_of(**more)).needs
    return {"tiering.host_memory": needs.least_bytes}


def test_a_slow_drive_bounds_the_step_by_its_bytes() -> None:
    plan, step = predicted(numbers(disk_bytes_per_s=1e6), **least_budget())
    assert plan.traffic.read_bytes > 12 * plan.params
    assert step.bottleneck == "disk"
    assert step.seconds == pytest.approx((plan.traffic.read_bytes + plan.traffic.write_bytes) / 1e6, rel=0.02)
    assert step.busy["disk"] == pytest.approx(step.seconds, rel=0.01), "it never idles"


def test_computing_hides_the_drive_from_the_break_even_on() -> None:
    rates = numbers(flop_per_s=1e9, disk_bytes_per_s=60e6)
    _, few = predicted(rates, seq=16, **least_budget())
    assert few.bottleneck == "disk"
    assert few.break_even_tokens is not None
    assert few.break_even_tokens > few.tokens
    _, many = predicted(rates, seq=4 * int(few.break_even_tokens), **least_budget())
    assert many.bottleneck == "compute"
    assert many.efficiency > 0.9


def test_a_device_has_the_optimizer_beside_it_and_a_cpu_does_not() -> None:
    rates = numbers(flop_per_s=1e9, optimizer_params_per_s=1e6, link_bytes_per_s=1e30)
    _, cpu = predicted(rates)
    _, device = predicted(rates, Machine(device_bytes=1 << 30))
    assert cpu.seconds == pytest.approx(cpu.parts["compute"] + cpu.parts["optimizer"], rel=0.01)
    assert device.seconds < 0.98 * cpu.seconds


def test_schedules_differ_in_what_hides_the_updates() -> None:
    rates = numbers(flop_per_s=2e8, disk_bytes_per_s=30e6)
    budget = least_budget()
    steps = {}
    for schedule in ("backward", "deferred", "barrier"):
        _, step = predicted(rates, **budget, **{"tiering.update_schedule": schedule})
        steps[schedule] = step.seconds
    assert steps["backward"] <= steps["deferred"] < steps["barrier"]


def test_speculative_updates_leave_room_for_the_least_budget() -> None:
    """Their units leave memory as the engine lets them, so that the next one finds room."""
    ahead = {"tiering.update_schedule": "speculative", "gradient_clipping": 1.0}
    budget = {"tiering.host_memory": plan_training(decoder_of(SHAPE), config_of(**ahead)).needs.least_bytes}
    _, step = predicted(numbers(flop_per_s=2e8, disk_bytes_per_s=30e6), **ahead, **budget)
    assert step.seconds > 0


def test_micro_batches_fetch_parameters_again_unless_they_go_layer_by_layer() -> None:
    accumulated = {"gradient_accumulation_steps": 4, "data_types": {"grad_accum_dtype": "bf16"}}
    budget = least_budget(**accumulated)
    once, _ = predicted(numbers())
    again, _ = predicted(numbers(), **accumulated, **budget)
    layers, _ = predicted(numbers(), **accumulated, **budget, **{"tiering.accumulation": "layer"})
    assert again.traffic.disk > 3 * layers.traffic.disk > 0
    assert once.traffic.disk == 0, "all fits"


def test_two_ranks_exchange_parameters_and_gradients_and_share_the_drive() -> None:
    _, alone = predicted(numbers(disk_bytes_per_s=1e6), **least_budget())
    plan, step = predicted(
        numbers(disk_bytes_per_s=1e6, collective_bytes_per_s=1e6),
        Machine(ranks=2, neighbours=2),
        **{"tiering.host_memory": "8MiB"},
    )
    moving = sum(unit.nbytes for unit in plan.units if unit.offloaded)
    assert plan.traffic.reduced == moving // 2, "half of the gradients belongs to the other"
    assert moving / 2 <= plan.traffic.unsharded <= moving
    assert 0 < step.parts["disk"] <= alone.parts["disk"]
    assert step.parts["disk"] == pytest.approx(2 * (plan.traffic.read_bytes + plan.traffic.write_bytes) / 1e6), (
        "both have one drive"
    )
    assert "collectives" not in step.unknown


def test_what_stays_on_the_device_is_gathered_for_every_use() -> None:
    """A unit is whole while it is used: there is room for all of them here, but what stays is a shard of each."""
    machine = Machine(ranks=2, neighbours=2, device_bytes=1 << 30, host_bytes=1 << 30)
    plan, _ = predicted(numbers(collective_bytes_per_s=1e6), machine, **{"tiering.host_memory": "64MiB"})
    moving = [unit.nbytes for unit in plan.units if unit.offloaded]
    assert plan.traffic.link == 0, "nothing is fetched"
    assert plan.traffic.unsharded == sum(moving + moving[:-1]) // 2, "the last one is used twice at once"


def test_shards_on_the_devices_put_nothing_on_the_link() -> None:
    machine = Machine(ranks=2, neighbours=2, device_bytes=1 << 30, host_bytes=1 << 30)
    rates = numbers(link_bytes_per_s=1e6, optimizer_params_per_s=1e6, collective_bytes_per_s=1e9)
    offloads = {"zero_optimization.offload_param": {"device": "none"}, "tiering.host_memory": "64MiB"}
    below, slow = predicted(rates, machine, **offloads, **{"zero_optimization.offload_optimizer": {"device": "cpu"}})
    there, fast = predicted(rates, machine, **offloads, **{"zero_optimization.offload_optimizer": {"device": "none"}})
    assert there.traffic.link == 0
    assert (there.traffic.link_up, there.traffic.link_down) == (0, 0)
    assert fast.parts["link"] == fast.parts["optimizer"] == 0 < min(slow.parts["link"], slow.parts["optimizer"])
    assert there.traffic.gathered == below.traffic.gathered
    shards = sum(spec.shard_nbytes for spec in there.sizing.specs)
    states = there.sizing.shards.states_bytes(there.sizing.on_device)
    assert there.device_used_bytes >= shards + states
    assert there.needs.homes_bytes < shards, "the host has what is looked at"


def test_groups_exchange_their_shards_alone() -> None:
    """Of four ranks in two groups: parameters and gradients within the group, and what is this rank's across."""
    rates, budget = numbers(collective_bytes_per_s=1e6), {"tiering.host_memory": "20MiB"}
    machine = Machine(ranks=4, neighbours=2)
    whole, _ = predicted(rates, machine, **budget)
    halves, step = predicted(rates, machine, **budget, **{"communication.shard_size": 2})
    of_whole, of_halves = (sum(unit.nbytes for unit in plan.units if unit.offloaded) for plan in (whole, halves))
    assert (whole.traffic.reduced, whole.traffic.averaged) == (of_whole * 3 // 4, 0)
    assert (halves.traffic.reduced, halves.traffic.averaged) == (of_halves // 2, of_halves // 2)
    several, _ = predicted(
        rates, machine, **{"tiering.host_memory": "64MiB", "communication.shard_size": 2}, gradient_accumulation_steps=3
    )
    assert several.traffic.reduced == 3 * halves.traffic.reduced
    assert several.traffic.averaged == halves.traffic.averaged, "once a step"
    once, twice = (plan.traffic.unsharded for plan in (halves, whole))
    assert once / of_halves == pytest.approx(twice / of_whole * 2 / 3, rel=0.05), "of one other rank, and of three"
    assert "collectives" not in step.unknown


def test_what_has_no_rate_is_named() -> None:
    _, step = predicted(Rates(disk=Duplex(1e6, 1e6, 1e6)), **least_budget())
    assert step.unknown == ("compute", "optimizer")
    assert step.break_even_tokens is None


def test_wear() -> None:
    plan, step = predicted(numbers(disk_bytes_per_s=1e6), **least_budget())
    day, days = step.wear(1e12)
    assert day == pytest.approx(plan.traffic.write_bytes / step.seconds * 86400)
    assert days == pytest.approx(1e12 / day)


# Rates #


def test_reads_and_writes_that_pair_go_at_the_mixed_rate() -> None:
    duplex = Duplex(inward=10.0, outward=5.0, both=12.0)
    assert duplex.seconds(60, 60) == pytest.approx(120 / 12)
    assert duplex.seconds(160, 60) == pytest.approx(10 + 10)
    assert duplex.seconds(60, 110) == pytest.approx(10 + 10)


def test_products_have_the_rate_of_their_layout_and_rows() -> None:
    rates = Rates({"nn": ((32, 1.0),), "nt": ((32, 100.0), (128, 400.0))})
    for rows, seconds in ((16, 4.0), (32, 4.0), (64, 2.0), (4096, 1.0)):
        assert rates.compute_s(Pass({Product("nt", rows): 400.0})) == pytest.approx(seconds)
    assert rates.compute_s(Pass({Product("nn", 512): 5.0})) == pytest.approx(5.0)


def test_operations_cost_what_launching_takes() -> None:
    work = Pass({Product("nn", 8): 1e6}, operations=100)
    rates = Rates({"nn": ((8, 1e9),)}, operation_s=1e-5)
    assert rates.compute_s(work) == pytest.approx(1e-3 + 1e-3)
    fresh = replace(rates, fresh_bytes_per_s=1e9)
    assert fresh.compute_s(replace(work, fresh_bytes=1e6)) == pytest.approx(1e-3 + 1e-3 + 1e-3)
    ahead = replace(rates, launches_ahead=True)
    assert ahead.compute_s(work) == pytest.approx(1e-3), "launched while others are computed"
    assert ahead.compute_s(replace(work, operations=300)) == pytest.approx(3e-3), "the device waits for launches"


def profile() -> dict[str, Any]:
    drive = {"read_bytes_per_s": 4e9, "write_bytes_per_s": 2e9, "mixed_bytes_per_s": 3e9}
    return {
        "drives": [drive],
        "drives_together": None,
        "contention": [
            {"part": "disk", "beside": ["optimizer"], "rows": None, "share": 0.5},
            {"part": "disk", "beside": ["compute", "optimizer"], "rows": 256, "share": 0.4},
            {"part": "disk", "beside": ["compute", "optimizer"], "rows": 16, "share": 0.1},
        ],
        "optimizer": [{"format": "split", "threads": n, "params_per_s": n * 1e8} for n in (1, 2)],
        "memory": [{"threads": n, "triad_bytes_per_s": n * 1e9, "fresh_bytes_per_s": n * 3e9} for n in (1, 2)],
        "products": [{"device": "cpu", "dtype": "bfloat16", "layout": "nt", "rows": 32, "flop_per_s": 1e10}],
        "link": None,
        "operations": [],
        "ranks": None,
    }


def test_rates_of_a_profile() -> None:
    rates = rates_of(profile(), dtype="bfloat16", state_format="split")
    assert rates.disk == Duplex(4e9, 2e9, 3e9)
    assert rates.left("disk", frozenset({"optimizer"}), 1024) == 0.5
    shares = [rates.left("disk", frozenset({"compute", "optimizer"}), rows) for rows in (1, 16, 64, 256, 1024)]
    assert shares == [0.1, 0.1, pytest.approx(0.2), 0.4, 0.4]
    assert rates.left("disk", frozenset({"compute"}), 64) is None
    assert rates.optimizer_params_per_s == 2e8
    assert rates.memory_bytes_per_s == 2e9
    assert rates.fresh_bytes_per_s == 6e9
    assert rates.gather_bytes_per_s is None
    with pytest.raises(infinity.ConfigError, match="no matrix products in float32 on cpu"):
        rates_of(profile(), dtype="float32", state_format="fp32")


def test_numbers_take_the_place_of_what_was_measured(tmp_path: Path) -> None:
    rates = with_numbers(rates_of(profile(), dtype="bfloat16", state_format="split"), disk_bytes_per_s=8e9, drives=2)
    assert rates.disk == Duplex(16e9, 16e9, 16e9)
    assert rates.optimizer_params_per_s == 2e8


# Beside one another #


def test_reads_and_writes_at_once_have_what_the_drive_gives_both() -> None:
    speeds = speeds_of(Rates(disk=Duplex(inward=10.0, outward=5.0, both=8.0)), 64, shared=False)
    assert speeds(frozenset({"read", "compute"})) == {"read": 1.0, "compute": 1.0}
    both = speeds(frozenset({"read", "write"}))
    assert both["read"] * 10.0 == both["write"] * 5.0 == pytest.approx(4.0)


def test_those_on_the_same_cores_share_them_as_was_measured_or_evenly() -> None:
    cores = frozenset({"compute", "optimizer", "collectives", "read"})
    even = speeds_of(Rates(), 64, shared=True)(cores)
    assert even == {**dict.fromkeys(("compute", "optimizer", "collectives"), pytest.approx(1 / 3)), "read": 1.0}
    pairs = {("compute", "optimizer"): 0.8, ("optimizer", "compute"): 0.6, ("compute", "disk"): 0.9}
    beside = {(part, frozenset({other})): ((16, share / 2), (64, share)) for (part, other), share in pairs.items()}
    busy = frozenset({"compute", "optimizer", "read"})
    measured = speeds_of(Rates(beside=beside), 64, shared=True)(busy)
    assert measured == {"compute": pytest.approx(0.8 * 0.9), "optimizer": 0.6, "read": 1.0}
    few_rows = speeds_of(Rates(beside=beside), 8, shared=True)(busy)
    assert few_rows == {"compute": pytest.approx(0.4 * 0.45), "optimizer": 0.3, "read": 1.0}
    beside["compute", frozenset({"optimizer", "disk"})] = ((16, 0.5),)
    measured = speeds_of(Rates(beside=beside), 64, shared=True)(busy)
    assert measured == {"compute": 0.5, "optimizer": 0.6, "read": 1.0}, "as all three were measured at once"
    assert set(speeds_of(Rates(), 64, shared=False)(cores).values()) == {1.0}
