"""What is gathered may be more than any budget holds, and is written back as it was, or as it was changed."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from infinity.errors import CapacityError, ConfigError, InfinityError
from infinity.zero import GatheredParameters
from tests.api.placements import PLACEMENTS, engine_in
from tests.behaviour.reference import batches, loss_of, tiny_llama, train_on

DATA = batches(4)


def same(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    assert set(values) == set(others)
    return all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_an_empty_context_over_the_whole_model_changes_nothing(modifier_rank, placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        losses = train_on(engine, DATA[:2])
        known = dict(engine.named_parameters())
        with GatheredParameters(engine.module, modifier_rank):
            assert same({name: p.data for name, p in engine.module.named_parameters()}, known)
        assert same(dict(engine.named_parameters()), known)
        losses += train_on(engine, DATA[2:])
    with engine_in(placement, tmp_path) as engine:
        assert train_on(engine, DATA) == losses


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_under_inference_mode_parameters_stay_trainable(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        with torch.inference_mode():
            engine.module.state_dict()
            with GatheredParameters(engine.module):
                assert not any(bool(param.isnan().any()) for param in engine.module.parameters())
        train_on(engine, DATA[:2])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_changes_to_more_than_the_budget_holds_are_all_kept(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        train_on(engine, DATA[:2])
        expected = {name: value * 2 for name, value in engine.named_parameters()}
        with GatheredParameters(engine.module, 0), torch.no_grad():
            for param in engine.module.parameters():
                param.mul_(2)
        assert same(dict(engine.named_parameters()), expected)


def test_an_evaluation_inside_computes_with_what_was_changed(tmp_path) -> None:
    ids = DATA[0]
    with engine_in("moves", tmp_path) as engine:
        with GatheredParameters(engine.module, 0), torch.no_grad():
            for param in engine.module.model.layers[1].parameters():
                param.zero_()
            inside = loss_of(engine, ids)
        with torch.no_grad():
            assert torch.equal(loss_of(engine, ids), inside)


def test_an_inner_context_leaves_the_changes_of_the_outer_one(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        weight = engine.module.lm_head.weight
        with GatheredParameters(engine.module, 0), torch.no_grad():
            weight.fill_(0.5)
            with GatheredParameters(weight):
                assert bool((weight == 0.5).all())
            assert bool((weight == 0.5).all())
        assert bool((dict(engine.named_parameters())["lm_head.weight"] == 0.5).all())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_change_that_no_rank_is_named_for_is_told(placement, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        before = dict(engine.named_parameters())
        weight = engine.module.lm_head.weight
        with (
            pytest.raises(InfinityError, match=r"`lm_head\.weight` in GatheredParameters without modifier_rank.*Give"),
            GatheredParameters(engine.module),
            torch.no_grad(),
        ):
            weight.mul_(2)
        assert same(dict(engine.named_parameters()), before)
        with pytest.raises(ZeroDivisionError), GatheredParameters(weight), torch.no_grad():
            weight.mul_(2).fill_(1 / 0)
        with GatheredParameters(engine.module), torch.no_grad(), GatheredParameters(weight, 0):
            weight.mul_(2)
        train_on(engine, DATA[:1])


def test_what_is_no_parameter_or_rank_is_refused_by_name(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        for params in (None, 3, "lm_head"):
            with pytest.raises(ConfigError, match=f"params is {params!r}; give a module"):
                GatheredParameters(params)  # type: ignore[arg-type]
        for rank in (-1, 1, True, 0.0, "0"):
            with pytest.raises(ConfigError, match=f"modifier_rank is {rank!r}"):  # noqa: SIM117  (it may be at once)
                with GatheredParameters(engine.module, rank):  # type: ignore[arg-type]
                    pass
        with GatheredParameters([engine.module.lm_head.weight, None], 0):  # type: ignore[list-item]  # as libraries do
            pass
        train_on(engine, DATA[:1])


def test_training_inside_is_refused_by_name(tmp_path) -> None:
    with engine_in("moves", tmp_path) as engine:
        refused = pytest.raises(InfinityError, match=r"`model\.norm\.weight` is gathered: leave GatheredParameters")
        with GatheredParameters(engine.module.model.norm), refused:
            loss_of(engine, DATA[0])
        train_on(engine, DATA[:1])


def test_what_stores_or_changes_values_inside_is_refused(tmp_path) -> None:
    """At its end the context would take an update, or what was loaded, for a change to be undone."""
    with engine_in("moves", tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        engine.backward(loss_of(engine, DATA[0]))
        with GatheredParameters(engine.module, 0), torch.no_grad():
            engine.module.lm_head.weight.fill_(0.5)
            for call in (
                engine.step,
                lambda: engine.save_checkpoint(tmp_path),
                lambda: engine.load_checkpoint(tmp_path),
            ):
                with pytest.raises(
                    InfinityError, match="inside GatheredParameters, which stores its changes at the end"
                ):
                    call()
            assert bool((dict(engine.named_parameters())["lm_head.weight"] == 0.5).all())
        engine.step()
        assert not bool((dict(engine.named_parameters())["lm_head.weight"] == 0.5).all())


def test_an_engine_that_is_closed_inside_leaves_nan(tmp_path) -> None:
    engine = engine_in("stays", tmp_path)
    context = GatheredParameters(engine.module, 0)
    context.__enter__()
    engine.close()
    with pytest.raises(InfinityError, match="the engine was closed while"):
        context.__exit__(None, None, None)
    assert all(bool(param.isnan().all()) for param in engine.module.parameters())


def test_memory_that_cannot_hold_the_values_is_refused_by_name(tmp_path, monkeypatch) -> None:
    with engine_in("moves", tmp_path) as engine:
        memory = psutil.virtual_memory()._replace(available=2**18)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        refused = pytest.raises(
            CapacityError, match=r"needs [\d.]+ [KM]iB of cpu memory for copies of `model.embed.*` and 29 others"
        )
        with refused, GatheredParameters(engine.module):
            pass
        with GatheredParameters(engine.module.lm_head):
            assert not bool(engine.module.lm_head.weight.isnan().any())


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_iteration_that_is_abandoned_holds_no_unit(placement, names, tmp_path) -> None:
    with engine_in(placement, tmp_path) as engine:
        undisturbed = train_on(engine, DATA[:3])
    with engine_in(placement, tmp_path) as engine:
        kept: list[Any] = [iter(engine.named_parameters() if names else engine.parameters()) for _ in range(5)]
        for position, iterator in enumerate(kept):
            for _ in range(1 + 5 * position):
                next(iterator)
        assert train_on(engine, DATA[:3]) == undisturbed
        engine.synchronize()
        assert not any(unit.compute_copy.pins for unit in engine._runtime.params.units)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_are_the_newest_values(placement, tmp_path) -> None:
    """Also under deferred updates, which have not begun when `step` returns."""
    with engine_in(placement, tmp_path, tiny_llama()) as engine:
        train_on(engine, DATA[:2])
        names, values = zip(*engine.named_parameters(), strict=True)
        assert all(torch.equal(value, other) for value, other in zip(values, engine.parameters(), strict=True))
        with GatheredParameters(engine.module):
            assert all(
                torch.equal(value, engine.module.get_parameter(name)) for name, value in zip(names, values, strict=True)
            )
