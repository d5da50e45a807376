"""Conversions, unfreezing and other parameters after `initialize` work as in torch, or are refused at once by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import InfinityError
from tests.api.placements import PLACEMENTS, config_of, engine_in
from tests.api.test_gathered import same
from tests.behaviour.reference import LR, WEIGHT_DECAY, Recipe, batches, loss_of, tiny_llama, train_on

DATA = batches(4)

# Conversions #

CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "float": lambda module: module.float(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to-dtype": lambda module: module.to(torch.float16),
    "to-device": lambda module: module.to("meta"),
    "to-empty": lambda module: module.to_empty(device="cpu"),
    "share-memory": lambda module: module.share_memory(),
}


@pytest.mark.parametrize("part", ["", "model.layers.1", "lm_head"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_conversion_is_refused_and_changes_nothing(placement, conversion, part, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        known = dict(engine.named_parameters())
        buffers = {name: (value.dtype, value.device) for name, value in engine.module.named_buffers()}
        with pytest.raises(InfinityError, match=r"lives in the tiers: convert the model before initialize"):
            CONVERSIONS[conversion](engine.module.get_submodule(part))
        assert {name: (value.dtype, value.device) for name, value in engine.module.named_buffers()} == buffers
        assert same(dict(engine.named_parameters()), known)
        train_on(engine, DATA[:1])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated:FutureWarning")  # torch 2.15
def test_a_trace_is_refused_where_parameters_leave_memory(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        with pytest.raises(
            InfinityError, match=r"torch.jit.trace .* cannot trace a model whose parameters leave memory"
        ):
            torch.jit.trace(engine.module, DATA[0])
        train_on(engine, DATA[:1])


def beside_a_default_device(module: nn.Module) -> nn.Module:
    with torch.device("meta"):
        return module.to("cpu")


NO_CHANGE: dict[str, Callable[[nn.Module], Any]] = {
    "to-device": lambda module: module.to("cpu"),
    "to-first-device": lambda module: module.to("cpu:0"),
    "beside-a-default-device": beside_a_default_device,
    "cpu": lambda module: module.cpu(),
    "bfloat16": lambda module: module.bfloat16(),
    "to-dtype": lambda module: module.to(torch.bfloat16),
    "memory-format": lambda module: module.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("conversion", NO_CHANGE)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_conversion_to_what_parameters_are_works(placement, conversion, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        losses = train_on(engine, DATA[:2])
    with engine_in(placement, tmp_path) as engine:
        first = train_on(engine, DATA[:1])
        engine.module.register_buffer("mine", torch.ones(1, 2, 2, 2))
        assert NO_CHANGE[conversion](engine.module) is engine.module
        assert engine.module.mine.dtype == (
            torch.bfloat16 if "16" in conversion or "dtype" in conversion else torch.float32
        )
        del engine.module.mine
        if conversion not in ("bfloat16", "to-dtype"):  # which round the rotary frequencies, as in torch
            assert first + train_on(engine, DATA[1:2]) == losses


def test_after_closing_a_model_converts_again(tmp_path) -> None:
    engine = engine_in("moves", tmp_path)
    engine.close()
    assert engine.module.float().lm_head.weight.dtype is torch.float32


def test_a_module_without_parameters_converts(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        rotary = engine.module.model.rotary_emb
        assert rotary.double().inv_freq.dtype is torch.float64


# What is trained #


def frozen_llama() -> nn.Module:
    model = tiny_llama()
    model.model.layers[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_unfreezing_what_is_in_no_group_is_refused_before_the_next_training_forward(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path, frozen_llama()) as engine:
        losses = train_on(engine, DATA[:2])
        engine.module.requires_grad_(True)
        named = r"`model\.layers\.1\.self_attn\.q_proj\.weight` requires a gradient now, did not at initialize"
        with pytest.raises(InfinityError, match=named):
            loss_of(engine, DATA[2])
        with torch.no_grad():
            loss_of(engine, DATA[2])
        engine.module.model.layers[1].requires_grad_(False)
        losses += train_on(engine, DATA[2:3])
    with engine_in(placement, tmp_path, frozen_llama()) as engine:
        assert train_on(engine, DATA[:3]) == losses


def replace(model: Any) -> str:
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    return "`lm_head.weight` was replaced"


def tie(model: Any) -> str:
    model.lm_head.weight = model.model.embed_tokens.weight
    return "`lm_head.weight` was replaced, tied to another"


def remove(model: Any) -> str:
    del model.lm_head.weight
    return "`lm_head.weight` was replaced, tied to another or removed"


def add_parameter(model: Any) -> str:
    model.lm_head.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    return "`lm_head.extra` was added after initialize"


def add_module(model: Any) -> str:
    model.model.layers.append(nn.Linear(2, 2))
    return "`model.layers.3.weight` was added after initialize"


def replace_module(model: Any) -> str:
    model.model.norm = nn.LayerNorm(64)
    return "`model.norm.weight` was added after initialize"


def parametrize(model: Any) -> str:
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity(), unsafe=True)
    return "`lm_head.weight` was replaced"


CHANGES = [replace, tie, remove, add_parameter, add_module, replace_module, parametrize]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_parameters_are_refused_by_name(placement, change, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, DATA[:1])
        message = change(engine.module)
        with pytest.raises(InfinityError, match=message.replace(".", r"\.")):
            loss_of(engine, DATA[0])


def test_modules_that_train_nothing_may_come(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        engine.module.extra = nn.Linear(2, 2).requires_grad_(False)
        engine.module.model.extra = nn.Dropout()
        train_on(engine, DATA[:2])


@pytest.mark.parametrize("schedule", ["backward", "deferred"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_freezing_is_skipping_as_in_torch(placement, schedule, tmp_path) -> None:
    """No gradient: no update, no decay, no step count; and trained again when it has one."""
    recipe = Recipe("fp32", extra={})
    config = config_of(placement, tmp_path, recipe)
    config["tiering"]["update_schedule"] = schedule
    plain, model = tiny_llama(), tiny_llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step, ids in enumerate(DATA):
            for block in (plain.model.layers[1], model.model.layers[1]):
                block.requires_grad_(step not in (1, 2))
            expected = loss_of(plain, ids)
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            assert torch.allclose(loss, expected, atol=1e-5)
        for name, value in engine.named_parameters():
            assert torch.allclose(value, plain.get_parameter(name), atol=1e-5), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_gradients_of_what_is_left_out_do_not_pile_up(placement, tmp_path, caplog) -> None:
    """Left out of `model_parameters`: not trained, as in torch, and said once."""
    plain, model = tiny_llama(), tiny_llama()
    optimizer = torch.optim.AdamW(plain.model.layers.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    config = config_of(placement, tmp_path, Recipe("fp32"))
    with caplog.at_level(logging.WARNING):
        made = infinity.initialize(model=model, config=config, model_parameters=model.model.layers.parameters())
    with made[0] as engine:
        (warning,) = [record.getMessage() for record in caplog.records if record.name == "infinity.zero.guards"]
        assert "`model.embed_tokens.weight` and 2 other parameters require a gradient" in warning
        caplog.clear()
        for ids in DATA:
            optimizer.zero_grad()
            loss_of(plain, ids).backward()
            optimizer.step()
            train_on(engine, [ids])
            assert all(param.grad is None for param in model.parameters())
        assert not [record for record in caplog.records if record.name == "infinity.zero.guards"]
        for name, value in engine.named_parameters():
            assert torch.allclose(value, plain.get_parameter(name), atol=1e-5), name
