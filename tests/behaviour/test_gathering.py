"""Parameters can be read and changed wherever they live, and models can be built without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import ConfigError, InfinityError
from infinity.zero import GatheredParameters, Init
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2, train_on

PLACEMENTS = ["none", "cpu", "nvme"]


def engine_for(precision: str, device: str, path: Any, model: nn.Module | None = None) -> infinity.Engine:
    values = Recipe(precision, clipping=1.0).config(Placement(device, device, path))
    return infinity.initialize(model=model or tiny_gpt2(), config=values)[0]


@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_looking_changes_nothing(precision, device, tmp_path) -> None:
    data = batches(6)
    with engine_for(precision, device, tmp_path) as engine:
        undisturbed = train_on(engine, data)
    with engine_for(precision, device, tmp_path) as engine:
        losses = train_on(engine, data[:3])
        known = dict(engine.named_parameters())
        for modifier in (None, 0):
            with GatheredParameters(engine.module, modifier):
                for name, param in engine.module.named_parameters():
                    assert torch.equal(param, known[name]), name
        assert losses + train_on(engine, data[3:]) == undisturbed


@pytest.mark.parametrize("device", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_changes_reach_the_weights_and_only_what_changed_the_masters(precision, device, tmp_path) -> None:
    """Halving one row exactly, twice: by hand on the in-memory engine's checkpointed state, and by gathering here."""
    data = batches(6)
    with engine_for(precision, device, tmp_path) as engine:
        train_on(engine, data[:3])
        before = dict(engine.named_parameters())
        weight = engine.module.get_parameter("transformer.h.1.mlp.c_fc.weight")
        with GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight[3] = 0.25
            weight[5, 7] *= -1
        after = dict(engine.named_parameters())
        for name, value in before.items():
            if name != "transformer.h.1.mlp.c_fc.weight":
                assert torch.equal(value, after[name]), name
        expected = before["transformer.h.1.mlp.c_fc.weight"]
        expected[3] = 0.25
        expected[5, 7] *= -1
        assert torch.equal(after["transformer.h.1.mlp.c_fc.weight"], expected)
        rest = train_on(engine, data[3:])
    if device != "none":
        with engine_for(precision, "none", tmp_path) as engine:
            train_on(engine, data[:3])
            weight = engine.module.get_parameter("transformer.h.1.mlp.c_fc.weight")
            with GatheredParameters(weight, 0), torch.no_grad():
                weight[3] = 0.25
                weight[5, 7] *= -1
            assert train_on(engine, data[3:]) == rest


@pytest.mark.parametrize("device", ["none", "nvme"])
def test_changes_to_frozen_parameters_are_kept(device, tmp_path) -> None:
    model = tiny_gpt2()
    model.transformer.h[0].requires_grad_(False)
    with engine_for("bf16", device, tmp_path, model) as engine:
        train_on(engine, batches(2))
        with GatheredParameters(engine.module.transformer.h[0], 0), torch.no_grad():
            for param in engine.module.transformer.h[0].parameters():
                param.fill_(0.125)
        train_on(engine, batches(2))
        for name, value in engine.named_parameters():
            if name.startswith("transformer.h.0."):
                assert bool((value == 0.125).all()), name


def test_without_a_modifier_or_after_an_exception_nothing_is_written(tmp_path) -> None:
    with engine_for("bf16", "nvme", tmp_path) as engine:
        known = dict(engine.named_parameters())
        refused = pytest.raises(InfinityError, match="without modifier_rank: its change is lost")
        with refused, GatheredParameters(engine.module), torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()
        with pytest.raises(ZeroDivisionError), GatheredParameters(engine.module, 0), torch.no_grad():
            next(engine.module.parameters()).fill_(1 / 0)
        for name, value in engine.named_parameters():
            assert torch.equal(value, known[name]), name


def test_a_new_shape_is_refused_by_name(tmp_path) -> None:
    with engine_for("bf16", "nvme", tmp_path) as engine:
        weight = engine.module.get_parameter("transformer.h.1.mlp.c_fc.weight")
        known = dict(engine.named_parameters())
        earlier = engine.module.get_parameter("transformer.h.0.mlp.c_fc.weight")
        named = pytest.raises(InfinityError, match=r"`transformer\.h\.1\.mlp\.c_fc\.weight` has shape \(2,\) now")
        with named, GatheredParameters([earlier, weight], 0), torch.no_grad():
            earlier.zero_()
            weight.data = torch.zeros(2)
        assert all(torch.equal(value, known[name]) for name, value in engine.named_parameters())
        train_on(engine, batches(1))


def test_between_forward_and_backward_it_is_refused(tmp_path) -> None:
    with engine_for("bf16", "nvme", tmp_path) as engine:
        (ids,) = batches(1)
        loss = loss_of(engine, ids)
        with pytest.raises(InfinityError, match="between a forward pass and its backward"):
            GatheredParameters(engine.module, modifier_rank=0).__enter__()
        engine.backward(loss)
        engine.step()


def test_parameters_of_no_engine_are_left_alone() -> None:
    layer = nn.Linear(2, 2)
    with GatheredParameters(layer, 0), torch.no_grad():
        layer.weight.fill_(2.0)
    assert bool((layer.weight == 2.0).all())


def test_a_model_that_was_built_in_files_trains_as_one_from_memory(tmp_path) -> None:
    values = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path))
    losses = []
    for enabled in (True, False):
        with Init(config=values, enabled=enabled):
            model = tiny_gpt2()
        with infinity.initialize(model=model, config=values)[0] as engine:
            losses.append(train_on(engine, batches(8)))
    assert losses[0] == losses[1]


def test_a_configuration_that_cannot_work_is_refused_before_building() -> None:
    with pytest.raises(ConfigError, match="unknown configuration key"):
        Init(config={"zero_optimisation": {}})
