"""A write to a parameter that the tiers do not see counts as in torch, or is refused by the parameter's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.integrations.deepspeed.parameters import GatheredParameters as DeepSpeedsGathered
from infinity.integrations.deepspeed.parameters import Init
from infinity.zero import GatheredParameters
from tests.api.placements import PLACEMENTS, engine_in
from tests.api.test_raw_parameters import trained_plainly
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import (
    Placement,
    Recipe,
    batches,
    tiny_gpt2,
    tiny_llama,
    train_on,
)

STEPS = 3
LOST = r"modification of `lm_head\.weight` in GatheredParameters without modifier_rank"

Write = Callable[[torch.Tensor], object]


def _in_place(param: torch.Tensor) -> None:
    with torch.no_grad():
        param.mul_(0.9)


def _by_data(param: torch.Tensor) -> None:
    param.data.mul_(0.9)


def _other_data(param: torch.Tensor) -> None:
    param.data = param.data * 0.9


WRITES: list[Write] = [_in_place, _by_data, _other_data]


def config_of(stage: int, offload: str = "none", path: Path | None = None, clipping: float = 0.0) -> dict[str, Any]:
    return Recipe(clipping=clipping).config(Placement(optimizer=offload, path=path), stage)


def masters_of(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in engine.named_parameters()}


def shrunk_each_step(
    config: dict[str, Any], write: Write, gathered: type[GatheredParameters] = GatheredParameters
) -> dict[str, torch.Tensor]:
    """Weights of a training that writes to its parameters after every step, inside a context."""
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config)[0] as engine:
        for ids in batches(STEPS):
            train_on(engine, [ids])
            with gathered(model.parameters()):
                for param in model.parameters():
                    write(param)
        return masters_of(engine)


def shrunk_plainly(write: Write, clipping: float) -> dict[str, torch.Tensor]:
    def change(model: nn.Module) -> None:
        for param in model.parameters():
            write(param)

    return trained_plainly(change, clipping, STEPS)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "cpu"), (2, "none"), (2, "nvme")])
def test_below_stage_3_a_write_inside_counts(stage, offload, clipping, write, tmp_path) -> None:
    ours = shrunk_each_step(config_of(stage, offload, tmp_path, clipping), write)
    for name, values in shrunk_plainly(write, clipping).items():
        torch.testing.assert_close(ours[name], values, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "cpu"), (2, "nvme")])
def test_so_it_does_on_ranks_and_under_deepspeeds_name(stage, offload, clipping, tmp_path) -> None:
    (tmp_path / "ranks").mkdir()
    config = config_of(stage, offload, tmp_path, clipping) | {"train_micro_batch_size_per_gpu": 2}
    expected = shrunk_plainly(_by_data, clipping)
    for ours in run_ranks(2, shrunk_each_step, config, _by_data, DeepSpeedsGathered, path=tmp_path / "ranks"):
        for name, values in expected.items():
            torch.testing.assert_close(ours[name], values, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("schedule", ["deferred", "backward", "barrier"])
def test_below_stage_3_a_named_schedule_counts_it_too(schedule) -> None:
    config = config_of(2)
    config["tiering"]["update_schedule"] = schedule
    ours = shrunk_each_step(config, _by_data)
    for name, values in shrunk_plainly(_by_data, 0.0).items():
        torch.testing.assert_close(ours[name], values, rtol=2e-4, atol=2e-5, msg=name)


def test_below_stage_3_a_write_before_an_exception_stands_as_in_torch() -> None:
    model = tiny_gpt2()
    with infinity.initialize(model=model, config=config_of(2))[0] as engine:
        with pytest.raises(ZeroDivisionError), GatheredParameters(model.lm_head):
            model.lm_head.weight.data.fill_(0.5).div_(1 / 0)
        assert bool((masters_of(engine)["transformer.wte.weight"] == 0.5).all())


def test_below_stage_3_an_inner_context_with_a_rank_stores_its_writes() -> None:
    model = tiny_gpt2()
    weight = model.transformer.h[0].attn.c_proj.weight
    with infinity.initialize(model=model, config=config_of(2))[0] as engine:
        with GatheredParameters(model):
            weight.data.fill_(0.25)
            with GatheredParameters(weight, modifier_rank=0):
                assert bool((weight == 0.25).all())
                weight.data.add_(0.25)
            weight.data.add_(0.25)
        assert bool((masters_of(engine)["transformer.h.0.attn.c_proj.weight"] == 0.75).all())


def _swap_rows(param: torch.Tensor) -> None:
    param.data[[0, 1]] = param.data[[1, 0]]


def _little(param: torch.Tensor) -> None:
    """As an average that moves slowly does."""
    param.data[3, 3] *= 1.01


AT_STAGE_3: list[Write] = [_by_data, _other_data, _swap_rows, _little, lambda param: param.data.neg_()]


@pytest.mark.parametrize("write", AT_STAGE_3)
@pytest.mark.parametrize("gathered", [GatheredParameters, DeepSpeedsGathered])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_at_stage_3_a_write_to_data_is_refused_by_name(placement, gathered, write, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, batches(1))
        before = masters_of(engine)
        refused = pytest.raises(infinity.InfinityError, match=LOST)
        with refused, gathered(engine.module.parameters()):
            write(engine.module.lm_head.weight)
        assert all(torch.equal(values, before[name]) for name, values in engine.named_parameters())
        train_on(engine, batches(1))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_at_stage_3_what_is_written_and_put_back_is_no_change(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        weight = engine.module.lm_head.weight
        with GatheredParameters(engine.module):
            kept = weight.data.clone()
            weight.data.zero_()
            weight.data.copy_(kept)
        with pytest.raises(ZeroDivisionError), GatheredParameters(weight):
            weight.data.zero_().div_(1 / 0)
        train_on(engine, batches(1))


def test_at_stage_3_nested_contexts_ask_who_gathered_first(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        weight = engine.module.lm_head.weight
        with GatheredParameters(engine.module), GatheredParameters(weight, modifier_rank=0):
            weight.data.fill_(0.5)
        with GatheredParameters(engine.module, modifier_rank=0), GatheredParameters(weight):
            weight.data.mul_(0.5)
        assert bool((masters_of(engine)["lm_head.weight"] == 0.25).all())
        outer = GatheredParameters(engine.module)
        outer.__enter__()
        with GatheredParameters(weight, modifier_rank=0):
            weight.data.fill_(0.75)
        weight.data.fill_(0.0)  # which nobody stores
        with pytest.raises(infinity.InfinityError, match=LOST):
            outer.__exit__(None, None, None)
        assert bool((masters_of(engine)["lm_head.weight"] == 0.75).all())


def _written_before_initialize() -> torch.Tensor:
    config = config_of(3) | {"train_micro_batch_size_per_gpu": 2}
    with Init(config_dict_or_path=config):
        model = tiny_gpt2()
    weight = model.transformer.h[0].attn.c_proj.weight
    with DeepSpeedsGathered(model.parameters()):
        weight.data.fill_(0.5)
    with infinity.initialize(model=model, config=config)[0] as engine:
        return masters_of(engine)["transformer.h.0.attn.c_proj.weight"]


def test_what_zero_init_has_made_keeps_a_write_to_data(tmp_path) -> None:
    for weight in run_ranks(2, _written_before_initialize, path=tmp_path):
        assert bool((weight == 0.5).all())


# Adapters #


def _merging(engine: infinity.Engine, more: Callable[[], object] = lambda: None) -> None:
    model = engine.module
    with GatheredParameters(list(model.parameters())):
        model.merge_adapter()
        more()
        model.unmerge_adapter()


@pytest.mark.parametrize(
    "more", [{}, {"use_dora": True}, {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_adapters_are_merged_and_unmerged_inside(placement, more, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | more

    def engine_of(path: Path) -> infinity.Engine:
        return engine_in(placement, path, peft.get_peft_model(tiny_llama(), peft.LoraConfig(**options)))

    data = batches(STEPS)
    with engine_of(tmp_path / "plain") as engine:
        undisturbed = train_on(engine, data)
    with engine_of(tmp_path / "merged") as engine:
        base = dict(engine.module.named_parameters())
        name = next(name for name in base if ".base_layer.weight" in name)
        losses = []
        for ids in data:
            before = masters_of(engine)[name]
            merged: list[torch.Tensor] = []
            _merging(engine, lambda merged=merged: merged.append(base[name].data.clone()))
            assert not torch.equal(merged[0], before)
            losses += train_on(engine, [ids])
        assert losses == undisturbed
        lost = r"base_layer\.weight` in GatheredParameters without"
        with pytest.raises(infinity.InfinityError, match=lost):
            _merging(engine, lambda: base[name].data.mul_(2))
        with pytest.raises(infinity.InfinityError, match=lost), GatheredParameters(engine.module):
            engine.module.merge_adapter()


# At rest #


AT_REST: list[Write] = [
    lambda param: param.data.zero_(),
    lambda param: param.data.fill_(1.0),
    lambda param: nn.init.zeros_(param),
    lambda param: nn.init.constant_(param, 0.5),
    lambda param: param.data.__setitem__((0, 0), 1.0),
    lambda param: param.detach().zero_(),
]

NEXT_USES: list[Callable[[infinity.Engine], object]] = [
    lambda engine: train_on(engine, batches(1)),
    lambda engine: engine.module(batches(1)[0]),
    lambda engine: engine.module.state_dict(),
    lambda engine: list(engine.named_parameters()),
    lambda engine: GatheredParameters(engine.module).__enter__(),
]


@pytest.mark.parametrize("write", AT_REST)
def test_a_write_at_rest_is_refused_at_the_next_use(write, tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        train_on(engine, batches(1))
        before = masters_of(engine)
        for use in NEXT_USES:
            weight = engine.module.model.layers[1].self_attn.q_proj.weight
            assert bool(weight.isnan().all())
            write(weight)
            with pytest.raises(infinity.InfinityError, match=r"`model\.layers\.1\..*q_proj\.weight`\.data was written"):
                use(engine)
            engine.zero_grad()
            assert all(torch.equal(values, before[name]) for name, values in engine.named_parameters())
            assert bool(weight.isnan().all())
        train_on(engine, batches(1))


def test_a_read_at_rest_is_no_write(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        undisturbed = train_on(engine, batches(STEPS))
    with engine_in("moves", tmp_path) as engine:
        losses = []
        for ids in batches(STEPS):
            for param in engine.module.parameters():
                assert param.data_ptr() != 0
                assert param.untyped_storage().data_ptr() != 0
                param.detach().float().cpu().numpy()
                param.data.clone()
            losses += train_on(engine, [ids])
        assert losses == undisturbed
