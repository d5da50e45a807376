"""Flat masters and gradients that scripts read off the optimizer: the newest values, for reading."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.utils import skip_init

import infinity
from infinity.config import format_size
from infinity.integrations.deepspeed.engine import DeepSpeedEngine, initialize
from infinity.integrations.deepspeed.live_views import LiveView, part_of_built
from infinity.integrations.deepspeed.parameters import Init
from infinity.integrations.deepspeed.values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from tests.api.small_models import CONFIG, WIDTH, Heads
from tests.integrations.test_optimizer_classes import backward, engine_at

pytestmark = pytest.mark.usefixtures("ends_process_group")
SIXTEEN_BITS = {"bf16": {"enabled": True}}
FLOAT32_SUMS = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values])


@pytest.mark.parametrize(
    ("stage", "name", "more"),
    [
        (0, "fp32_groups_flat", SIXTEEN_BITS),
        (1, "fp32_groups_flat_partition", FLOAT32_SUMS),
        (1, "single_partition_of_fp32_groups", SIXTEEN_BITS),
        (2, "single_partition_of_fp32_groups", {}),
        (3, "fp32_partitioned_groups_flat", SIXTEEN_BITS),
    ],
)
def test_masters_are_those_of_the_last_step(stage, name, more) -> None:
    with engine_at(stage, **more) as engine:
        (view,) = getattr(engine.optimizer, name)
        before = view.clone()
        assert type(before) is torch.Tensor
        backward(engine)
        engine.step()
        masters = flat(safe_get_full_fp32_param(param) for param in engine.module.parameters())
        assert view.shape == masters.shape
        assert torch.equal(view, masters)
        assert not torch.equal(view, before)
        assert torch.allclose(getattr(engine.optimizer, name)[0], view)


def test_without_an_adam_of_deepspeeds_own_masters_are_by_parameter() -> None:
    with engine_at(0, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **SIXTEEN_BITS) as engine:
        assert engine.optimizer.low_precision_dtype is torch.bfloat16
        (group,) = engine.optimizer.fp32_groups
        for view, param in zip(group, engine.module.parameters(), strict=True):
            assert torch.equal(view, safe_get_full_fp32_param(param).flatten())


def test_gradients_are_those_of_the_step_and_nothing_after_it() -> None:
    with engine_at(3) as engine:
        buffer = engine.optimizer.grad_partitions_flat_buffer
        backward(engine)
        grads = flat(safe_get_full_grad(param) for param in engine.module.parameters())
        assert torch.equal(buffer, grads)
        (norm,) = engine.optimizer._get_norm_groups()
        torch.testing.assert_close(norm, grads.norm())
        engine.step()
        assert not buffer.any()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_clipping_gradients_stay_until_the_step_where_nothing_is_offloaded(stage) -> None:
    with engine_at(stage, gradient_clipping=0) as engine:
        params = list(engine.module.parameters())
        before = [safe_get_full_fp32_param(param) for param in params]
        backward(engine)
        grads = [safe_get_full_grad(param) for param in params]
        assert all(
            torch.equal(safe_get_full_fp32_param(param), value) for param, value in zip(params, before, strict=True)
        )
        plain = Heads()
        plain.load_state_dict({name: value for (name, _), value in zip(plain.named_parameters(), before, strict=True)})
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
        plain(x).square().mean().backward()
        for grad, param in zip(grads, plain.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad)
        engine.step()
        assert not any(
            torch.equal(safe_get_full_fp32_param(param), value) for param, value in zip(params, before, strict=True)
        )
    states = {"zero_optimization": {"stage": max(stage, 1), "offload_optimizer": {"device": "cpu"}}}
    with engine_at(stage, gradient_clipping=0, **states) as engine:
        backward(engine)
        with pytest.raises(infinity.InfinityError, match='set the schedule to "deferred"'):
            safe_get_full_grad(engine.module.mix.weight)
        engine.step()


def test_lightnings_engine_updates_during_backward_without_clipping() -> None:
    config = CONFIG | {"gradient_clipping": 0, "zero_optimization": {"stage": 3}}
    with infinity.initialize(model=Heads(), config=config, engine_class=DeepSpeedEngine)[0] as engine:
        backward(engine)
        with pytest.raises(infinity.InfinityError, match='set the schedule to "deferred"'):
            safe_get_full_grad(engine.module.mix.weight)
        engine.step()


def test_a_parameters_part_is_its_newest_values() -> None:
    with engine_at(3, **SIXTEEN_BITS) as engine:
        param = engine.module.mix.weight
        assert isinstance(param.ds_tensor, LiveView)
        assert (param.ds_tensor.shape, param.ds_tensor.dtype) == ((param.ds_numel,), torch.bfloat16)
        backward(engine)
        engine.step()
        assert torch.equal(param.ds_tensor, safe_get_full_fp32_param(param).flatten().bfloat16())


def test_nobody_changes_them_and_words_say_how_to() -> None:
    with engine_at(2) as engine:
        (view,) = engine.optimizer.single_partition_of_fp32_groups
        for change in (lambda: view.zero_(), lambda: view.copy_(view * 2), lambda: view.mul_(2)):
            with pytest.raises(infinity.InfinityError, match=r"single_partition_of_fp32_groups: its values .* safe"):
                change()
        other = torch.zeros(view.numel())
        other.copy_(view)  # which only reads it
        assert torch.equal(other, view)
        assert torch.equal(copy.deepcopy(view), other)
        assert torch.equal(pickle.loads(pickle.dumps(view)), other)
    with pytest.raises(infinity.InfinityError, match="closed"):
        view.clone()


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_at(2) as engine:
        (view,) = engine.optimizer.single_partition_of_fp32_groups
        monkeypatch.setattr("infinity.integrations.deepspeed.live_views.free_bytes", lambda device: 100)
        with pytest.raises(infinity.CapacityError, match=f"needs {format_size(view.numel() * 4)} of host memory"):
            view.sum()


@pytest.mark.parametrize("stage", [1, 2])
def test_the_parameters_of_a_group_are_there_flat(stage) -> None:
    with engine_at(stage, **SIXTEEN_BITS) as engine:
        (view,) = engine.optimizer.bit16_groups_flat
        before = view.clone()
        assert (view.dtype, view.grad_fn) == (torch.bfloat16, None)
        backward(engine)
        engine.step()
        assert torch.equal(view, flat(param.detach() for param in engine.module.parameters()))
        assert not torch.equal(view, before)
        with pytest.raises(infinity.InfinityError, match=r"bit16_groups_flat: its values are in the tiers"):
            view.zero_()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_states_are_told_by_parameter_and_by_flat_tensor(stage) -> None:
    with engine_at(stage, **SIXTEEN_BITS) as engine:
        optimizer = engine.optimizer
        names = ("fp32_groups_flat", *["single_partition_of_fp32_groups"] * 2, "fp32_partitioned_groups_flat")
        (masters,) = getattr(optimizer, names[stage])
        assert masters not in optimizer.state, "there are none before the first step"
        for _ in range(2):
            backward(engine)
            engine.step()
        of_flat = optimizer.state[masters]
        assert (masters in optimizer.state, of_flat["step"], len(optimizer.state)) == (True, 2, 0)
        for name in ("exp_avg", "exp_avg_sq"):
            values = [safe_get_full_optimizer_state(param, name) for param in engine.module.parameters()]
            assert torch.equal(of_flat[name], flat(values))
            for state in (optimizer.state, optimizer.optimizer.state):
                for param, value in zip(engine.module.parameters(), values, strict=True):
                    assert torch.equal(state[param][name], value)
        backward(engine)
        engine.step()
        assert torch.equal(of_flat["exp_avg"], optimizer.state[masters]["exp_avg"]), "the newest, whenever it was asked"
        with pytest.raises(infinity.InfinityError, match=r"\['exp_avg'\]: its values are in the tiers"):
            of_flat["exp_avg"].zero_()
        assert optimizer.state[torch.zeros(2)] == {"step": 3}
        assert optimizer.optimizer.state_dict()["state"] == {}
        assert pickle.loads(pickle.dumps(optimizer.state)) == {}


def test_an_optimizer_tells_where_in_a_step_it_is() -> None:
    with engine_at(3, gradient_accumulation_steps=2) as engine:
        optimizer = engine.optimizer
        told = [(optimizer.micro_step_id, optimizer._epilogue_ran_this_backward)]
        for _ in range(2):
            backward(engine)
            told.append((optimizer.micro_step_id, optimizer._epilogue_ran_this_backward))
            engine.step()
        assert told == [(0, False), (0, True), (1, True)]
        assert (optimizer.micro_step_id, optimizer._epilogue_ran_this_backward) == (0, False)


def test_a_part_of_a_parameter_before_initialize_is_of_its_values() -> None:
    with Init():
        model = torch.nn.Linear(3, 5)
        without_values = skip_init(torch.nn.Linear, 4, 2)
    part = model.weight.ds_tensor
    assert without_values.weight.ds_tensor.numel() == 8
    assert torch.equal(part, model.weight.detach().flatten())
    with torch.no_grad():
        model.weight.fill_(2)
    assert torch.equal(part, torch.full((15,), 2.0))
    assert type(pickle.loads(pickle.dumps(part))) is torch.Tensor
    assert torch.equal(copy.deepcopy(part), torch.full((15,), 2.0))
    with initialize(model=model, config=CONFIG)[0] as engine:
        assert torch.equal(engine.module.weight.ds_tensor, torch.full((15,), 2.0))
    gone = part_of_built(torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(infinity.InfinityError, match="the parameter is gone"):
        gone.clone()
