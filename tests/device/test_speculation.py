"""On a device with its own memory, speculative updates give the bits of the CPU, committed or rolled back."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from infinity.errors import CapacityError
from infinity.schedule import on_device
from infinity.zero import filling
from infinity.zero.foresight import Foresight
from tests.behaviour.reference import Placement, Recipe, assert_same_bits, named_budget
from tests.behaviour.test_speculation import SOMETIMES, middle_norm
from tests.device import target
from tests.device.training import SPEEDS, engine_on, on_cpu_like, speculates_always, tiny, train_here, train_on_device

STEPS = 5


@cache
def least_memory(accumulation: int) -> int:
    """Return the smallest budget; with it, nearly all states are on the drive."""
    with tempfile.TemporaryDirectory() as path:
        placement = Placement("nvme", "nvme", Path(path), "64KiB", 1, "speculative")
        with pytest.raises(CapacityError) as refused:
            engine_on(target.DEVICE, tiny(), Recipe("bf16", accumulation, 1.0), placement)
    return named_budget(refused.value)


@pytest.mark.parametrize(
    ("speed", "accumulation", "clipping"),
    [
        ("slow_kernels", 1, SOMETIMES),
        ("slow_link", 1, SOMETIMES),
        ("slow_kernels", 2, SOMETIMES),
        ("slow_link", 2, SOMETIMES),
        ("slow_link", 1, 100.0),  # no step clips
    ],
)
@pytest.mark.parametrize(
    ("params", "states", "keeps"),
    [
        ("nvme", "nvme", False),
        ("nvme", "nvme", True),
        ("cpu", "nvme", True),
        ("cpu", "cpu", False),
        ("none", "cpu", False),
        ("none", "nvme", False),
    ],
)
def test_the_bits_are_those_of_the_cpu(
    params, states, keeps, clipping, accumulation, speed, tmp_path, monkeypatch
) -> None:
    ahead = speculates_always(monkeypatch)
    clipping = middle_norm("gpt2", "bf16", accumulation) if clipping == SOMETIMES else clipping
    recipe = Recipe("bf16", accumulation, clipping, STEPS)
    # Crash-consistent steps double-buffer the states in memory, too; the others keep an undo log, if it has room.
    host_memory = None if keeps or params != "nvme" else least_memory(accumulation) * 5 // 4
    placement = Placement(params, states, tmp_path, "64KiB", host_memory, "speculative")
    with target.configured(**SPEEDS[speed]):
        trained = train_on_device(recipe, placement, crash_consistent=keeps)
    assert ahead
    assert_same_bits(trained, on_cpu_like(recipe))


@pytest.mark.parametrize(
    ("params", "states", "clipping", "more", "schedule"),
    [
        ("cpu", "cpu", 1.0, {}, "speculative"),
        ("none", "cpu", 1.0, {}, "speculative"),
        ("none", "cpu", 0.0, {}, "backward"),
        ("nvme", "cpu", 1.0, {}, "deferred"),  # parameters on the drive cannot be reconstructed from states in memory
        ("cpu", "nvme", 1.0, {}, "speculative"),
        ("nvme", "nvme", 1.0, {}, "speculative"),
        ("none", "nvme", 0.0, {}, "backward"),
        ("none", "cpu", 1.0, {"fill_device": "auto"}, "speculative"),
        ("none", "cpu", 1.0, {"fill_device": True}, "speculative"),
        ("none", "nvme", 1.0, {"fill_device": True}, "speculative"),
    ],
)
def test_it_is_chosen_by_itself_where_it_costs_nothing(params, states, clipping, more, schedule, tmp_path) -> None:
    recipe = Recipe("bf16", 1, clipping, STEPS)
    for device, expected in ((target.DEVICE, schedule), ("cpu", schedule if clipping == 0 else "deferred")):
        placement = Placement(params, states, tmp_path, "64KiB", schedule="auto")
        with engine_on(device, tiny(), recipe, placement, **more) as engine:
            assert engine._runtime.sizing.schedule.value == expected


@pytest.mark.parametrize(
    ("precision", "accumulation", "schedule"),
    [
        ("bf16", 1, "speculative"),
        ("fp16", 1, "speculative"),
        ("fp32", 1, "deferred"),  # its gradients cannot be reconstructed from the states
        ("bf16", 2, "deferred"),  # nor can the sums of several passes
    ],
)
def test_on_the_drives_it_is_chosen_where_gradients_need_not_be_kept(
    precision, accumulation, schedule, tmp_path
) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", schedule="auto")
    with engine_on(target.DEVICE, tiny(), Recipe(precision, accumulation, 1.0), placement) as engine:
        assert engine._runtime.sizing.schedule.value == schedule


@pytest.mark.parametrize("params", ["none", "nvme"])
def test_on_the_drives_it_is_chosen_where_they_have_room_for_two_versions_and_a_checkpoint(params, tmp_path) -> None:
    recipe, placement = Recipe("bf16", 1, 1.0), Placement(params, "nvme", tmp_path, "64KiB", schedule="auto")

    def chosen(capacity: int) -> tuple[str, int]:
        """Return the schedule, and the bytes of one version of all fields on the drive."""
        nvme = [{"path": str(tmp_path), "capacity": capacity}]
        with engine_on(target.DEVICE, tiny(), recipe, placement, nvme=nvme) as engine:
            sizing = engine._runtime.sizing
            states = sizing.layout.bytes_per_param * sum(sizing.shards.numels)
            values = sum(spec.nbytes for spec in sizing.specs if spec.offloaded)
            return sizing.schedule.value, states + values

    schedule, slot_bytes = chosen(1 << 30)
    assert schedule == "speculative"
    assert chosen(3 * slot_bytes)[0] == "speculative"
    assert chosen(3 * slot_bytes - 1)[0] == "deferred"


@pytest.mark.parametrize(
    ("params", "states", "clipping", "speed"),
    [
        ("cpu", "cpu", 0.0, "slow_link"),
        ("cpu", "cpu", SOMETIMES, "slow_kernels"),
        ("none", "cpu", 0.0, "slow_kernels"),
        ("none", "cpu", SOMETIMES, "slow_link"),
        ("none", "nvme", 0.0, "slow_link"),
        ("none", "nvme", SOMETIMES, "slow_kernels"),
        ("nvme", "nvme", 0.0, "slow_kernels"),
        ("nvme", "nvme", SOMETIMES, "slow_link"),
    ],
)
def test_with_an_embedding_that_stays_on_the_device(params, states, clipping, speed, tmp_path, monkeypatch) -> None:
    """After the first step the device updates the embedding, and the updates of the blocks are speculative."""
    monkeypatch.setattr(Foresight, "speculates", True)
    monkeypatch.setattr(on_device, "_WORTH_NUMEL", 1)
    monkeypatch.setattr(filling, "units_that_fit", lambda rules, shards, order, spare_bytes: order[:1])
    recipe = Recipe("bf16", 1, middle_norm("gpt2", "bf16", 1) if clipping else 0.0, STEPS)
    placement = Placement(params, states, tmp_path, "64KiB", schedule="auto")
    with (
        target.configured(**SPEEDS[speed]),
        engine_on(target.DEVICE, tiny(), recipe, placement, fill_device="auto") as engine,
    ):
        trained = train_here(engine, recipe)
        assert engine._runtime.states.units[0].are_on_device
        assert not engine._runtime.states.units[1].are_on_device
    assert_same_bits(trained, on_cpu_like(recipe))
