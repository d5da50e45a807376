"""A parameter's master, gradient and moments, looked at and set by name of DeepSpeed's functions."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.integrations.deepspeed import values
from tests.api.small_models import WIDTH, Heads
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import batches, loss_of, tiny_llama

LR = 1e-2
SCALE = 2.0**8


def config(stage: int, precision: str = "fp32", **more: Any) -> dict[str, Any]:
    section = {"enabled": True} | ({"loss_scale": SCALE} if precision == "fp16" else {})
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
        **({} if precision == "fp32" else {precision: section}),
        **more,
    }


def heads() -> nn.Module:
    torch.manual_seed(0)
    return Heads()


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, WIDTH, generator=generator) for _ in range(count)]


def look(engine: infinity.Engine) -> dict[str, Any]:
    with torch.device("meta"):  # a script's default device changes nothing
        return _look(engine)


def _look(engine: infinity.Engine) -> dict[str, Any]:
    return {
        name: {
            "master": values.safe_get_full_fp32_param(param),
            "grad": values.safe_get_full_grad(param),
            **{key: values.safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, param in engine.module.named_parameters()
    }


def seen(configuration: dict[str, Any], shares: int = 1) -> list[dict[str, Any]]:
    """What is there before and after the second step of two, on this rank's share of the data."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    engine, *_ = infinity.initialize(model=heads(), config=configuration)
    with engine:
        for index, x in enumerate(inputs(2 * shares)[rank::shares]):
            engine.backward(engine(x).square().mean())
            if index == 0:
                engine.step()
        before = look(engine)
        engine.step()
        return [before, look(engine)]


def expected(shares: int = 1) -> list[dict[str, Any]]:
    model = heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    found = []
    data = inputs(2 * shares)
    for step in range(2):
        optimizer.zero_grad()
        for x in data[step * shares : (step + 1) * shares]:
            (model(x).square().mean() / shares).backward()
        if step == 1:
            found.append(_of_torch(model, optimizer))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    return [*found, _of_torch(model, optimizer)]


def _of_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        name: {
            "master": param.detach().clone(),
            "grad": None if param.grad is None else param.grad.clone(),
            **{key: optimizer.state[param][key].clone() for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, param in model.named_parameters()
    }


def assert_alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for here, there in zip(found, wanted, strict=True):
        for name, fields in there.items():
            for key, value in fields.items():
                if value is None:
                    assert here[name][key] is None
                else:
                    torch.testing.assert_close(here[name][key], value, rtol=1e-5, atol=1e-7, msg=f"{name} {key}")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_seen_is_what_torch_has(stage, tmp_path) -> None:
    more: dict[str, Any] = {}
    if stage == 3:
        nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
        more = {"zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}
    assert_alike(seen(config(stage) | more), expected())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masters_are_exact_and_gradients_without_the_loss_scale(precision) -> None:
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config(3, precision))
    with engine:
        parameters = dict(engine.module.named_parameters())
        for name, param in tiny_llama().named_parameters():
            assert torch.equal(values.safe_get_full_fp32_param(parameters[name]), param.detach())
        ids = batches(1)[0]
        engine.backward(loss_of(engine, ids))
        loss_of(reference := tiny_llama(), ids).backward()
        for name, param in reference.named_parameters():
            found = values.safe_get_full_grad(parameters[name])
            assert (found - param.grad).norm() < 0.05 * param.grad.norm(), name


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_set_is_what_the_next_step_uses(stage) -> None:
    engine, *_ = infinity.initialize(model=heads(), config=config(stage, gradient_clipping=0.5))
    model = heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    generator = torch.Generator().manual_seed(9)
    with engine:
        parameters = dict(engine.module.named_parameters())
        for x in inputs(2):
            engine.backward(engine(x).square().mean())
            model(x).square().mean().backward()
            for name, param in model.named_parameters():
                noise = torch.randn(param.shape, generator=generator)
                values.safe_set_full_grad(parameters[name], noise)
                param.grad.copy_(noise)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            engine.step()
            for name, param in model.named_parameters():
                noise = torch.randn(param.shape, generator=generator)
                values.safe_set_full_fp32_param(parameters[name], noise)
                values.safe_set_full_optimizer_state(parameters[name], noise.square(), "exp_avg_sq")
                with torch.device("meta"):
                    values.safe_set_local_optimizer_state(parameters[name], noise.flatten() / 2, "exp_avg")
                param.data.copy_(noise)
                optimizer.state[param]["exp_avg_sq"].copy_(noise.square())
                optimizer.state[param]["exp_avg"].copy_(noise / 2)
            optimizer.zero_grad()
        for name, value in engine.named_parameters():
            assert torch.equal(value, model.get_parameter(name).detach())
        engine.backward(engine(inputs(1)[0]).square().mean())
        engine.step()
        model(inputs(1)[0]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for name, value in engine.named_parameters():
            torch.testing.assert_close(value, model.get_parameter(name).detach())


def local_parts() -> list[list[int]]:
    engine, *_ = infinity.initialize(model=heads(), config=config(3))
    rank = torch.distributed.get_rank()
    with engine:
        sizes = []
        for param in engine.module.parameters():
            own = values.safe_get_local_fp32_param(param)
            values.safe_set_local_fp32_param(param, torch.full_like(own, rank + 1.0))
            whole = values.safe_get_full_fp32_param(param)
            sizes.append([own.numel(), int((whole == rank + 1).sum()), param.numel()])
        return sizes


def of_rank() -> Any:
    return [seen(config(stage), 2) for stage in (1, 3)], local_parts()


def test_two_ranks_see_the_same_whole_and_each_has_its_part(tmp_path) -> None:
    of_ranks = run_ranks(2, of_rank, path=tmp_path)
    wanted = expected(2)
    for found, _ in of_ranks:
        for stage in found:
            assert_alike(stage, wanted)
    for first, second in zip(*(parts for _, parts in of_ranks), strict=True):
        assert first[0] == first[1]
        assert second[0] == second[1]
        assert first[0] + second[0] == first[2] == second[2]


def test_what_cannot_be_answered_is_refused_by_name() -> None:
    alone = nn.Parameter(torch.ones(2))
    assert values.safe_get_full_fp32_param(alone) is None
    assert values.safe_get_full_grad(alone) is None
    engine, *_ = infinity.initialize(model=heads(), config=config(3, gradient_clipping=0))
    with engine:
        param = next(engine.module.parameters())
        with pytest.raises(
            infinity.ConfigError, match=re.escape("no state 'momentum' for each element; it has exp_avg,")
        ):
            values.safe_get_full_optimizer_state(param, "momentum")
        with pytest.raises(infinity.ConfigError, match=r"`mix\.weight` has 4096 elements, and the value 3"):
            values.safe_set_full_fp32_param(param, torch.ones(3))
        with pytest.raises(infinity.ConfigError, match=r"`mix\.weight`: this rank's part has 4096 elements, not 3"):
            values.safe_set_local_fp32_param(param, torch.ones(3))
        with infinity.zero.GatheredParameters(param), pytest.raises(infinity.InfinityError, match="is gathered; leave"):
            values.safe_set_full_fp32_param(param, torch.ones(4096))
        with pytest.raises(infinity.InfinityError, match="the parameter has no gradient"):
            values.safe_set_full_grad(param, torch.ones(4096))
        engine.backward(engine(inputs(1)[0]).square().mean())
        with pytest.raises(infinity.InfinityError, match='set the schedule to "deferred"'):
            values.safe_get_full_grad(param)


# Engines without an optimizer, and their ends #


@pytest.mark.parametrize("placed", ["memory", "nvme"])
def test_an_engine_without_an_optimizer_evaluates_and_has_no_states(placed, tmp_path) -> None:
    section: dict[str, Any] = {"stage": 3}
    if placed == "nvme":
        section["offload_param"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    ids = batches(1)[0]
    with torch.no_grad():
        wanted = loss_of(tiny_llama(), ids)
    engine, optimizer, _, scheduler = infinity.initialize(
        model=tiny_llama(), config={"train_batch_size": 2, "zero_optimization": section}, trains=False
    )
    with engine:
        assert (optimizer, scheduler) == (None, None)
        with torch.no_grad():
            assert torch.equal(loss_of(engine, ids), wanted)
        with pytest.raises(infinity.InfinityError, match="this engine has no optimizer"):
            engine.backward(loss_of(engine, ids))
        with pytest.raises(infinity.InfinityError, match="this engine has no optimizer"):
            engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_whose_engine_is_destroyed_can_have_another(stage) -> None:
    model = heads()
    x = inputs(1)[0]
    losses = []
    for _ in range(2):
        engine, *_ = infinity.initialize(model=model, config=config(stage))
        loss = engine(x).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        engine.destroy()
        losses.append(model(x).square().mean().item())
    assert losses[1] == losses[2]
    assert len(set(losses)) == 3  # both have trained


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_is_destroyed_within_a_step_gives_the_values_of_the_last(stage, caplog) -> None:
    """As after a micro-batch that was too large, before the same model is trained with a smaller one."""
    model, x = heads(), inputs(1)[0]
    engine, *_ = infinity.initialize(model=model, config=config(stage, gradient_accumulation_steps=2))
    for _ in range(3):  # a step and a half
        engine.backward(engine(x).square().mean())
        engine.step()
    wanted = {name: value.clone() for name, value in engine.named_parameters()}
    with pytest.raises(infinity.InfinityError, match="in the middle of a step"):
        engine.destroy(strict=True)
    engine.destroy()
    assert not caplog.records
    assert all(torch.equal(param, wanted[name]) for name, param in model.named_parameters())
    assert all(param.grad is None for param in model.parameters())
    infinity.initialize(model=model, config=config(stage))[0].close()


def test_an_engine_that_has_failed_is_destroyed_with_a_warning(caplog) -> None:
    engine, *_ = infinity.initialize(model=heads(), config=config(0))
    engine.close()
    engine.destroy()
    assert "the model is left without values: the engine is closed" in caplog.text


def distances_of(stage: int) -> list[float]:
    """How far an engine's parameters are from the model's own, by place."""
    found = []
    for options in ({}, {"max_unit_size": "1KiB"}):
        model = tiny_llama().float()
        own = [param.detach().clone() for param in model.parameters()]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam"},
            "zero_optimization": {"stage": stage},  # small parameters outside of blocks are in a unit of their own
        }
        with infinity.initialize(model, config | {"tiering": options})[0] as engine:
            names = [name for name, _ in engine.named_parameters()]
            assert names == [name for name, _ in model.named_parameters()]
            found += [float((a - b).abs().max()) for a, b in zip(engine.parameters(), own, strict=True)]
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engines_parameters_come_in_the_models_order(stage, tmp_path) -> None:
    """Whoever pairs them with another model's by place must not get others, whatever units they are in."""
    results = [distances_of(stage)] if stage == 0 else run_ranks(2, distances_of, stage, path=tmp_path)
    assert not any(map(any, results))
