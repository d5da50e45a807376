"""What a script does to the optimizer object after `initialize`: counts as in torch, or is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import infinity
from tests.api.small_models import CONFIG, Heads, engine_of, train, weights


def _append(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "weight_decay": 0.0})


def _remove(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"][0]


def _replace(optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["params"] = [param.detach().clone().requires_grad_() for param in group["params"]]


CHANGES: list[Callable[[torch.optim.Optimizer], None]] = [_append, _remove, _replace]


@pytest.mark.parametrize("when", ["between steps", "before step()"])
@pytest.mark.parametrize("clipping", [0.0, 1.0])
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_were_formed_anew_are_refused_and_not_ignored(change, clipping, when) -> None:
    with engine_of(gradient_clipping=clipping) as engine:
        train(engine)
        loss = engine(torch.ones(4, 64)).square().mean()
        if when == "between steps":
            change(engine.optimizer)
            with pytest.raises(infinity.InfinityError, match=r"parameter group.*form groups before initialize"):
                engine.backward(loss)
        else:
            engine.backward(loss)
            change(engine.optimizer)
            with pytest.raises(infinity.InfinityError, match=r"parameter group.*form groups before initialize"):
                engine.step()


def test_a_group_cannot_be_added() -> None:
    with engine_of() as engine:
        with pytest.raises(
            infinity.InfinityError, match=r"add_param_group after initialize.*give initialize all groups"
        ):
            engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        train(engine)


def _given() -> tuple[Any, torch.optim.Optimizer]:
    model = Heads()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    return infinity.initialize(model=model, config=config, optimizer=given)[0], given


def _states() -> dict[str, Any]:
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()


def test_moments_of_a_state_dict_are_not_left_out_without_a_word() -> None:
    engine, given = _given()
    with engine:
        for optimizer in (engine.optimizer, given):
            with pytest.raises(infinity.ConfigError, match=r"moments.* 4 parameters would be ignored"):
                optimizer.load_state_dict(_states())
        train(engine)
    given.load_state_dict(_states())  # which is the script's own again


def test_hyper_parameters_of_a_state_dict_count(caplog) -> None:
    with engine_of() as engine, engine_of() as other:
        state = _states()
        state["param_groups"][0] |= {"lr": 1e-3, "weight_decay": 0.5}
        with caplog.at_level(logging.WARNING):
            engine.optimizer.load_state_dict({"param_groups": state["param_groups"]})
        assert "moments and step counts are saved and restored by" in caplog.text
        other.optimizer.param_groups[0].update(lr=1e-3, weight_decay=0.5)
        assert engine.get_lr() == [1e-3]
        train(engine)
        train(other)
        values = weights(other)
        assert all(torch.equal(value, values[name]) for name, value in weights(engine).items())
