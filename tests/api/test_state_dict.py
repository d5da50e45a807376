"""`state_dict`, `load_state_dict` and copies of a model whose parameters live in the tiers give what torch gives."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import infinity
from infinity.errors import CapacityError, InfinityError
from infinity.tiers import SameMemory
from infinity.zero import GatheredParameters
from tests.api.placements import PLACEMENTS, engine_in
from tests.api.test_gathered import same
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import DTYPES, Placement, Recipe, batches, loss_of, tiny_gpt2, tiny_llama, train_on

STEPS = 2
DATA = batches(4)


CALLS: list[str] = []


def count_call(module: nn.Module, args: Any, output: Any) -> None:
    CALLS.append(type(module).__name__)


def newest(engine: Any) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters())


def cloned(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items()}


# state_dict #


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("link", [None, SameMemory], ids=["unified", "discrete"])
def test_it_has_the_newest_values_under_torchs_keys(link, placement, tmp_path) -> None:
    kwargs = {} if link is None else {"link": link()}
    with engine_in(placement, tmp_path, **kwargs) as engine:
        train_on(engine, DATA[:STEPS])
        state = cloned(engine.module.state_dict())  # updates may still run
        assert list(state) == list(tiny_llama().state_dict())
        assert same(state, newest(engine))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_submodules_has_its_own(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, DATA[:STEPS])
        block = engine.module.model.layers[1]
        state = cloned(block.mlp.state_dict(prefix="model.layers.1.mlp."))
        assert {name: value.shape for name, value in block.state_dict().items()} == {
            name: param.shape for name, param in block.named_parameters()
        }
        assert state
        assert same(state, {name: value for name, value in newest(engine).items() if name in state})


def test_kept_it_does_not_change(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        train_on(engine, DATA[:STEPS])
        state = engine.module.state_dict()
        known = cloned(state)
        train_on(engine, DATA[:STEPS])
        assert same(state, known)
        assert not same(newest(engine), known)
    assert same(state, known)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert same(torch.load(file), known)


@pytest.mark.parametrize("link", [None, SameMemory], ids=["unified", "discrete"])
def test_where_parameters_stay_it_is_their_memory_which_outlives_the_engine(link, tmp_path) -> None:
    kwargs = {} if link is None else {"link": link()}
    with engine_in("stays", tmp_path, **kwargs) as engine:
        state = engine.module.state_dict()
        before = cloned(state)
        train_on(engine, DATA[:1])
        last = newest(engine)
        assert same(state, last)
        assert not same(state, before)
    assert same(state, last)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_between_forward_and_backward_it_disturbs_nothing(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        undisturbed = train_on(engine, DATA[:3])
    with engine_in(placement, tmp_path) as engine:
        losses = []
        for ids in DATA[:3]:
            known = newest(engine)
            loss = loss_of(engine, ids)
            assert same(cloned(engine.module.state_dict()), known)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == undisturbed


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ties_and_hooks_of_the_model_are_kept(placement, tmp_path) -> None:
    model = tiny_gpt2()

    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["renamed"] = state.pop(prefix + "transformer.wpe.weight")

    model.register_state_dict_post_hook(rename)
    with engine_in(placement, tmp_path, model) as engine:
        train_on(engine, DATA[:STEPS])
        state = engine.module.state_dict()
        assert torch.equal(state["renamed"], newest(engine)["transformer.wpe.weight"])
        assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_memory_that_cannot_hold_it_is_refused(tmp_path, monkeypatch) -> None:
    with engine_in("moves", tmp_path) as engine:
        memory = psutil.virtual_memory()._replace(available=2**18)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        with pytest.raises(CapacityError, match=r"state_dict needs [\d.]+ [KM]iB .* engine\.save_16bit_model"):
            engine.module.state_dict()
        assert same(
            engine.module.lm_head.state_dict(prefix="lm_head."), {"lm_head.weight": newest(engine)["lm_head.weight"]}
        )


def test_inside_a_context_it_has_what_was_changed(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        with GatheredParameters(engine.module.lm_head, 0), torch.no_grad():
            engine.module.lm_head.weight.fill_(0.5)
            state = engine.module.state_dict()
        train_on(engine, DATA[:1])
        assert bool((state["lm_head.weight"] == 0.5).all())


# load_state_dict #


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_loading_is_loading_before_initialize(precision, placement, tmp_path) -> None:
    """With the masters: what a 16-bit value leaves open of an element that has it already stays, and nothing else."""
    recipe = Recipe(precision, clipping=1.0)
    model = tiny_llama(seed=7)
    state = {name: value.to(DTYPES[precision]) for name, value in model.state_dict().items()}
    for param, old in zip(model.parameters(), tiny_llama().parameters(), strict=True):
        new = param.data.to(DTYPES[precision])
        param.data = torch.where(new == old.data.to(DTYPES[precision]), old.data, new.float())
    with engine_in(placement, tmp_path, model, recipe) as engine:
        expected = train_on(engine, DATA[:3])
    with engine_in(placement, tmp_path, recipe=recipe) as engine:
        result = engine.module.load_state_dict(state)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        assert same(newest(engine), state)
        assert train_on(engine, DATA[:3]) == expected


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_loading_in_the_middle_of_training_counts_after_pending_updates(placement, tmp_path) -> None:
    state = {name: value.bfloat16() for name, value in tiny_llama(seed=7).state_dict().items()}
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, DATA[:STEPS])
        kept = {name: value for name, value in newest(engine).items() if not name.startswith("model.layers.1.")}
        engine.module.model.layers[1].load_state_dict(tiny_llama(seed=7).model.layers[1].state_dict())
        after = newest(engine)
        assert same({name: after[name] for name in kept}, kept)
        assert all(torch.equal(value, state[name]) for name, value in after.items() if name not in kept)
        train_on(engine, DATA[:1])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_torchs_own_checks_stay(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        known = newest(engine)
        state = tiny_llama().state_dict()
        del state["lm_head.weight"]
        state["model.norm.weight"] = torch.ones(3)
        with pytest.raises(RuntimeError, match=r"(?s)Missing.*lm_head\.weight.*size mismatch for model\.norm\.weight"):
            engine.module.load_state_dict(state)
        engine.module.load_state_dict({}, strict=False)
        after = newest(engine)
        assert all(torch.equal(after[name], known[name]) for name in ("lm_head.weight", "model.norm.weight"))
        train_on(engine, DATA[:1])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_assigning_is_refused_before_anything_changes(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        known = newest(engine)
        with pytest.raises(InfinityError, match=r"load_state_dict\(assign=True\) would put other parameters"):
            engine.module.load_state_dict(tiny_llama(seed=7).state_dict(), assign=True)
        assert same(newest(engine), known)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_module_around_the_engines_saves_and_loads_it_too(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, DATA[:STEPS])
        around = nn.ModuleDict({"net": engine.module, "own": nn.Linear(2, 2)})
        state = cloned(around.state_dict())
        train_on(engine, DATA[:STEPS])
        around.load_state_dict(state)
        values = {f"net.{name}": value for name, value in newest(engine).items()}
        assert same(values, {name: value for name, value in state.items() if name.startswith("net.")})


def test_loading_between_forward_and_backward_is_refused(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        undisturbed = train_on(engine, DATA[:1])
    with engine_in("moves", tmp_path) as engine:
        loss = loss_of(engine, DATA[0])
        with pytest.raises(InfinityError, match="between a forward pass and its backward"):
            engine.module.load_state_dict(tiny_llama(seed=7).state_dict())
        engine.backward(loss)
        engine.step()
        assert [loss.item()] == undisturbed


# Copies #


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def test_a_deep_copy_is_a_plain_model_with_the_newest_values(
    make: Callable[[], nn.Module], placement, tmp_path
) -> None:
    model = make()
    model.register_forward_hook(count_call)
    plain = copy.deepcopy(model)
    with engine_in(placement, tmp_path, model) as engine:
        train_on(engine, DATA[:STEPS])
        twin = copy.deepcopy(engine.module)
        values = newest(engine)
        with torch.no_grad():
            expected = loss_of(engine, DATA[0])
    assert same(dict(twin.named_parameters()), values)
    assert type(twin) is type(plain)
    for copied, original in zip(twin.modules(), plain.modules(), strict=True):
        assert set(vars(copied)) == set(vars(original))
        hooks = [name for name in vars(original) if "hooks" in name]
        assert {name: len(getattr(copied, name) or ()) for name in hooks} == {
            name: len(getattr(original, name) or ()) for name in hooks
        }
    CALLS.clear()
    with torch.no_grad():
        assert torch.equal(loss_of(twin, DATA[0]), expected)
    assert CALLS
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    loss_of(twin, DATA[0]).backward()
    optimizer.step()
    assert not same(dict(twin.named_parameters()), values)
    torch.save(twin, io.BytesIO())
    assert copy.deepcopy(twin.float()).training


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_copying_disturbs_no_training(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        undisturbed = train_on(engine, DATA[:3])
    with engine_in(placement, tmp_path) as engine:
        losses = train_on(engine, DATA[:1])
        copy.deepcopy([engine.module.model.layers[0], engine.module])
        assert losses + train_on(engine, DATA[1:3]) == undisturbed


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_averaged_models_follow_plain_torch(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        seen = []
        average = AveragedModel(engine.module)
        for ids in DATA[:3]:
            train_on(engine, [ids])
            with GatheredParameters(engine.module):
                average.update_parameters(engine.module)
            seen.append(newest(engine))
        expected = nn.ParameterDict()
        plain: Any = AveragedModel(expected)
        for values in seen:
            expected.update({name.replace(".", "_"): value.clone() for name, value in values.items()})
            plain = AveragedModel(expected) if plain.n_averaged == 0 else plain
            plain.update_parameters(expected)
        got = {name.replace(".", "_"): value for name, value in average.module.named_parameters()}
        assert all(torch.equal(value, got[name]) for name, value in plain.module.items())


def test_pickling_is_refused(tmp_path) -> None:
    with engine_in("stays", tmp_path) as engine, pytest.raises(InfinityError, match=r"pickle .* its state_dict\(\)"):
        torch.save(engine.module, io.BytesIO())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_closing_leaves_nothing_behind(placement, tmp_path) -> None:
    model = tiny_llama()
    model.state_dict = lambda: {"own": 1}  # as some adapters do
    before = [set(vars(module)) for module in model.modules()]
    with engine_in(placement, tmp_path, model):
        assert model.state_dict() == {"own": 1}
    assert [set(vars(module)) for module in model.modules()] == before
    assert model.state_dict() == {"own": 1}
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())
    assert not any(module._load_state_dict_post_hooks for module in model.modules())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_copy_leaves_methods_that_were_replaced_after_initialize(placement, tmp_path) -> None:
    """As scripts for adapters do: the replacement calls the method that it replaces."""
    with engine_in(placement, tmp_path) as engine:
        model, replaced = engine.module, engine.module.state_dict
        model.state_dict = lambda: {"own": 1, **replaced()}
        before = dict(vars(model))
        keys = set(model.state_dict())
        copy.deepcopy(model)
        assert vars(model) == before
        assert set(model.state_dict()) == keys
        assert "own" in keys
    assert set(model.state_dict()) == keys


def test_an_engine_that_is_closed_in_a_copy_leaves_no_guards(tmp_path) -> None:
    class Closing(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            engine.close()
            return dict(vars(self))

    model = nn.Sequential(nn.Linear(2, 2), Closing(2, 2))
    before = [set(vars(module)) for module in model.modules()]
    engine = infinity.initialize(model, Recipe("fp32").config(Placement()))[0]
    copy.deepcopy(model)
    assert [set(vars(module)) for module in model.modules()] == before


# Several ranks #


def _look_alone() -> bool:
    config = Recipe("bf16", clipping=1.0).config(Placement())
    config["zero_optimization"]["stage"] = 0
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        train_on(engine, DATA[:STEPS])
        if torch.distributed.get_rank():
            return True
        values = newest(engine)
        with GatheredParameters(engine.module):
            shown = cloned(dict(engine.module.named_parameters()))
        twin = dict(copy.deepcopy(engine.module).named_parameters())
        return all(same(values, each) for each in (shown, twin, engine.module.state_dict()))


def test_where_every_rank_has_all_one_may_look_alone(tmp_path) -> None:
    assert run_ranks(2, _look_alone, path=tmp_path) == [True, True]


def _state_dicts(stage: int) -> Any:
    config = Recipe("bf16", clipping=1.0).config(Placement())
    config["zero_optimization"]["stage"] = stage
    with infinity.initialize(model=tiny_llama(), config=config)[0] as engine:
        train_on(engine, DATA[:STEPS])
        state = cloned(engine.module.state_dict())
        twin = dict(copy.deepcopy(engine.module).named_parameters())
        values = newest(engine)
        equal = same(state, values) and same(twin, values)
        rank = torch.distributed.get_rank()
        other = tiny_llama(seed=7 + rank).state_dict()
        engine.module.load_state_dict(other)
        loaded = newest(engine)
        with GatheredParameters(engine.module, modifier_rank=1), torch.no_grad():
            engine.module.lm_head.weight.fill_(rank)
        rank_1s = bool((newest(engine)["lm_head.weight"] == 1).all())
        train_on(engine, DATA[:1])
        return equal and rank_1s, loaded


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_on_two_ranks_all_have_the_newest_and_load_rank_0s(stage, tmp_path) -> None:
    expected = {name: value.bfloat16() for name, value in tiny_llama(seed=7).state_dict().items()}
    for equal, loaded in run_ranks(2, _state_dicts, stage, path=tmp_path):
        assert equal
        assert same(loaded, expected)
