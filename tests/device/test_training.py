"""Training on a device with memory of its own has the bits of the CPU, wherever states live and whatever lags."""

from __future__ import annotations

import dataclasses
import gc
import itertools

import pytest
import torch

import infinity
from infinity.tiers import link
from infinity.zero.gradients import Gradients
from infinity.zero.outside_units import OutsideUnits
from infinity.zero.ranks import ALONE
from infinity.zero.updates import Updates
from tests.api.test_buffers import Quantised
from tests.behaviour.reference import (
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    loss_of,
    tiny_gpt2,
)
from tests.device import target
from tests.device.training import (
    SPEEDS,
    STEPS,
    engine_on,
    on_cpu_like,
    tiny,
    train_here,
    train_on_device,
    train_over,
)

RECIPES = [Recipe("bf16", 2, 0.5, STEPS), Recipe("fp32", 1, 0.0, STEPS)]
RECIPE_IDS = [f"{r.precision}-accumulate{r.accumulation}-clip{r.clipping:g}" for r in RECIPES]
TIERS = ("none", "cpu", "nvme")
CLIPPED = Recipe("bf16", 1, 0.5, STEPS)


@pytest.fixture(params=SPEEDS)
def _speed(request):
    with target.configured(**SPEEDS[request.param]):
        yield


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_IDS)
@pytest.mark.parametrize(("params", "optimizer"), list(itertools.product(TIERS, TIERS)))
def test_placements(params, optimizer, recipe, tmp_path) -> None:
    placed = train_on_device(recipe, Placement(params, optimizer, tmp_path, "64KiB"))
    assert_same_bits(placed, on_cpu_like(recipe))


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize(
    ("precision", "schedule"),  # fp16 knows after backward only whether it updates
    [("bf16", "backward"), ("bf16", "deferred"), ("bf16", "barrier"), ("fp16", "deferred"), ("fp16", "barrier")],
)
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
def test_gradients_of_one_micro_batch(optimizer, schedule, precision, tmp_path) -> None:
    """They are downloaded while the device computes; nothing is added to them."""
    recipe = Recipe(precision, 1, 0.0 if schedule == "backward" else 0.5, STEPS)
    placement = Placement("cpu", optimizer, tmp_path, "64KiB", schedule=schedule)
    assert_same_bits(train_on_device(recipe, placement), on_cpu_like(recipe))


def test_the_host_waits_for_units_and_not_for_every_gradient(monkeypatch) -> None:
    waits = []
    wait = link._EventToken.result

    def counted(token: link._EventToken) -> None:
        if not token.done():
            waits.append(token)
        wait(token)

    model = tiny()
    trained = sum(1 for _ in model.parameters())
    with (
        target.configured(launch_us=300),
        engine_on(target.DEVICE, model, Recipe("bf16"), Placement("cpu", "cpu")) as engine,
    ):
        train_over(engine, batches(2))
        monkeypatch.setattr(link._EventToken, "result", counted)
        ids = batches(1)[0].to(target.DEVICE)
        loss = loss_of(engine, ids)
        waits.clear()
        engine.backward(loss)
        engine.step()
    assert len(waits) < trained / 3  # about one a unit; some more where the machine is busy


def test_a_unit_is_updated_before_the_next_ones_gradients_are_waited_for(monkeypatch) -> None:
    told: list[tuple[str, int]] = []
    ask, update = Gradients.are_finite, Updates._update_final

    def asked(gradients: Gradients, unit: int) -> bool:
        told.append(("asked", unit))
        return ask(gradients, unit)

    def updated(updates: Updates, unit: int, *, finite: bool) -> None:
        told.append(("updated", unit))
        update(updates, unit, finite=finite)

    monkeypatch.setattr(Gradients, "are_finite", asked)
    monkeypatch.setattr(Updates, "_update_final", updated)
    placement = Placement("cpu", "cpu", schedule="backward")
    with (
        target.configured(link_us=2000),
        engine_on(target.DEVICE, tiny(), Recipe("bf16"), placement) as engine,
    ):
        train_over(engine, batches(1))
    assert told
    assert told == [(what, unit) for _, unit in told[::2] for what in ("asked", "updated")]


@pytest.mark.parametrize(
    ("architecture", "recipe", "tier", "speed"),  # any three of the values meet
    [
        ("gpt2", RECIPES[0], "cpu", "slow_kernels"),
        ("gpt2", RECIPES[0], "nvme", "slow_link"),
        ("gpt2", RECIPES[1], "cpu", "slow_link"),
        ("gpt2", RECIPES[1], "nvme", "slow_kernels"),
        ("llama", RECIPES[0], "cpu", "slow_link"),
        ("llama", RECIPES[0], "nvme", "slow_kernels"),
        ("llama", RECIPES[1], "cpu", "slow_kernels"),
        ("llama", RECIPES[1], "nvme", "slow_link"),
    ],
)
def test_tight_device_memory(architecture, recipe, tier, speed, tmp_path) -> None:
    """Room for two blocks, so that units are fetched and evicted all the time."""
    host_memory = {"cpu": None, "nvme": "900KB" if recipe.precision == "bf16" else "2MB"}[tier]
    placement = Placement(tier, tier, tmp_path, "64KiB", host_memory)
    least = least_device_memory(placement, recipe, architecture)
    with target.configured(**SPEEDS[speed]):
        placed = train_on_device(recipe, placement, tiny(architecture), device_memory=least)
    assert_same_bits(placed, on_cpu_like(recipe, architecture))


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("schedule", ["backward", "deferred", "barrier"])
def test_update_schedules(schedule, tmp_path) -> None:
    recipe = dataclasses.replace(CLIPPED, clipping=0.0)
    placed = train_on_device(recipe, Placement("nvme", "nvme", tmp_path, "64KiB", schedule=schedule))
    assert_same_bits(placed, on_cpu_like(recipe))


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@pytest.mark.parametrize("memory", ["512KiB", "4MiB"])
def test_activations(activations, memory, tmp_path) -> None:
    placement = Placement("cpu", "cpu", tmp_path, "64KiB")
    tiering = {"activations": activations, "activation_memory": memory, "nvme": [{"path": str(tmp_path)}]}
    placed = train_on_device(CLIPPED, placement, **tiering)
    assert_same_bits(placed, on_cpu_like(CLIPPED))


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant, tmp_path) -> None:
    model = tiny()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    placed = train_on_device(CLIPPED, Placement("nvme", "nvme", tmp_path, "64KiB", "900KB"), model)
    assert_same_bits(placed, on_cpu_like(CLIPPED))


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("tier", ["none", "nvme"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_layer_major_accumulation(tier, clipping, tmp_path) -> None:
    recipe = Recipe("bf16", 2, clipping, STEPS)
    with engine_on(
        target.DEVICE, tiny("llama"), recipe, Placement(tier, tier, tmp_path, "64KiB"), accumulation="layer"
    ) as engine:
        ids = (ids.to(engine.device) for ids in batches(recipe.steps * recipe.accumulation))
        data = ({"input_ids": each, "labels": each} for each in ids)
        losses = [engine.train_batch(data).item() for _ in range(recipe.steps)]
        placed = Result(losses, {name: param.detach().cpu() for name, param in engine.named_parameters()})
    expected = on_cpu_like(recipe, "llama")
    means = torch.tensor(expected.losses).view(-1, recipe.accumulation).mean(1).tolist()
    assert_same_bits(placed, Result(means, expected.weights))


@pytest.mark.usefixtures("_speed")
def test_an_evaluation_between_steps(tmp_path) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "64KiB")
    with (
        engine_on(target.DEVICE, tiny(), CLIPPED, placement) as engine,
        engine_on(target.REFERENCE, tiny(), CLIPPED, target.PLAIN) as plain,
    ):
        for ids in batches(CLIPPED.steps):
            for each in (engine, plain):
                loss = loss_of(each, ids.to(each.device))
                each.backward(loss)
                each.step()
            with torch.no_grad():
                ours, theirs = (loss_of(each, ids.to(each.device)).item() for each in (engine, plain))
                assert ours == theirs


# What begins and ends #


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("tier", TIERS)
def test_the_first_forward_has_the_initial_values(tier, tmp_path) -> None:
    ids = batches(1)[0]
    with torch.no_grad():
        with engine_on(target.REFERENCE, tiny(), CLIPPED, target.PLAIN) as engine:
            expected = loss_of(engine, ids.to(engine.device)).item()
        with engine_on(target.DEVICE, tiny(), CLIPPED, Placement(tier, tier, tmp_path, "64KiB")) as engine:
            assert loss_of(engine, ids.to(engine.device)).item() == expected


@pytest.mark.usefixtures("_speed")
@pytest.mark.parametrize("passes", ["steps", "forward", "backward"])
@pytest.mark.parametrize("activations", ["none", "nvme"])
def test_closing_while_copies_are_under_way(passes, activations, tmp_path) -> None:
    """No copy touches freed memory, and no memory leaks."""
    placement = Placement("nvme", "nvme", tmp_path, "64KiB")
    tiering = {"device_memory": "400KB", "activations": activations, "activation_memory": "4MiB"}
    before = target.allocated_bytes()
    model = tiny()
    engine = engine_on(target.DEVICE, model, CLIPPED, placement, **tiering)
    for ids in batches(2):
        loss = loss_of(engine, ids.to(engine.device))
        if passes != "forward":
            engine.backward(loss)
        if passes == "steps":
            engine.step()
        elif passes == "backward":
            break
    engine.close()
    torch.accelerator.synchronize()
    del loss, engine, model
    gc.collect()
    assert target.allocated_bytes() == before


@pytest.mark.usefixtures("_speed")
def test_checkpoints_move_between_placements(tmp_path) -> None:
    data = batches(6)

    with engine_on(target.DEVICE, tiny(), CLIPPED, Placement("cpu", "cpu")) as engine:
        train_over(engine, data[:3])
        engine.save_checkpoint(tmp_path / "saved", blocking=False)
        expected = train_over(engine, data[3:])
    swap = tmp_path / "swap"
    swap.mkdir()
    for device, tier in ((target.DEVICE, "nvme"), (target.REFERENCE, "none")):
        with engine_on(device, tiny(seed=5), CLIPPED, Placement(tier, tier, swap, "64KiB")) as engine:
            engine.load_checkpoint(tmp_path / "saved")
            assert train_over(engine, data[3:]) == expected


def least_device_memory(placement: Placement, recipe: Recipe, architecture: str) -> int:
    """The least device memory that this recipe runs in, as the error for too small a one states it."""
    config = recipe.config(placement)
    config["tiering"]["fill_device"] = False
    return least_memory(tiny(architecture), config, "device_memory", device=target.DEVICE)


@pytest.mark.parametrize(
    "placement", [("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")], ids="-".join
)
def test_parameters_that_are_unfrozen_between_two_steps(placement, tmp_path) -> None:
    """As on the CPU, where they had states from the start; states in host memory come to the device by themselves."""
    recipe = Recipe("bf16", clipping=0.5)
    ends = []
    for device, late in ((target.DEVICE, True), (target.REFERENCE, False)):
        model = tiny("llama").bfloat16().float()
        block = model.model.layers[1]
        block.requires_grad_(not late)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        where = Placement(*placement, tmp_path) if late else target.PLAIN
        config = recipe.config(where)
        del config["optimizer"]
        with infinity.initialize(model=model, config=config, optimizer=optimizer, device=device)[0] as engine:
            block.requires_grad_(False)
            losses = train_over(engine, batches(2))
            block.requires_grad_(True)
            losses += train_over(engine, batches(3, seed=2))
            ends.append((losses, {name: param.detach().cpu() for name, param in engine.named_parameters()}))
    assert ends[0][0] == ends[1][0]
    for name, values in ends[0][1].items():
        assert torch.equal(values, ends[1][1][name]), name


@pytest.mark.parametrize("schedule", ["backward", "deferred"])
def test_prefetches_leave_updates_memory_on_their_way(schedule, tmp_path) -> None:
    """Parameters are on the drive, and the device has room for a few blocks."""

    def blocks() -> torch.nn.Module:
        model = tiny_gpt2(blocks=10)
        model.config._attn_implementation = "eager"
        return model

    recipe = Recipe("bf16", 1, 0.0, STEPS)
    with engine_on(target.REFERENCE, blocks(), recipe, target.PLAIN) as engine:
        expected = train_here(engine, recipe)
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", "800KB", schedule=schedule)
    memory = (204 << 10) + 3 * (12 * 64 * 64 * 2 + 1700)  # the least, and three blocks more
    with target.configured(**SPEEDS[next(reversed(SPEEDS))]):
        found = train_on_device(recipe, placement, blocks(), device_memory=memory)
    assert_same_bits(found, expected)


def test_integer_parameters_move_to_the_device_and_back() -> None:
    model = Quantised()
    outside, base = OutsideUnits(model), model.base.data
    outside.place(torch.bfloat16, torch.device(target.DEVICE), ALONE)
    assert model.base.device.type == target.DEVICE
    assert model.base.dtype == torch.int8
    outside.give_back()
    assert model.base.data_ptr() == base.data_ptr()
    with engine_on(target.DEVICE, model, Recipe("bf16"), Placement()) as engine:
        engine.backward(engine(torch.ones(2, 4).bfloat16().to(target.DEVICE)).square().mean())
        engine.step()
    assert torch.equal(model.base, torch.arange(-8, 8, dtype=torch.int8).view(4, 4))
