"""Modules that are gathered whole: units that are not cut, and ranks that use different parts of them."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.config import LeafModules
from infinity.zero.leaf_modules import (
    apply_leaf_modules,
    called_leaves,
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
)
from infinity.zero.partition import Alignment, make_partition
from tests.behaviour.ranks import run_ranks

WIDTH, LR = 8, 1e-2
NOTHING = LeafModules()


class Experts(nn.Module):
    """Uses the experts that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        y = self.gate(x)
        for index in used:
            y = y + self.experts[index](x).tanh()
        return y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moe = Experts()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        return self.last(self.moe(self.first(x), used)).square().mean()


def units_of(model: nn.Module, limit_numel: int | None = None, named: LeafModules = NOTHING) -> dict[str, set[str]]:
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    partition = make_partition(
        model,
        groups,
        align=Alignment(8, param=1),
        persistence_threshold=0,
        offloaded=True,
        limit_numel=limit_numel,
        leaves=called_leaves(model, named),
    )
    return {unit.name: {info.name for info in unit.params} for unit in partition.units}


def under(model: nn.Module, name: str) -> set[str]:
    return {own for own, _ in model.named_parameters() if own.startswith(name)}


@pytest.mark.parametrize(
    "named", [LeafModules(("Experts",)), LeafModules((), ("moe.experts",)), LeafModules((), (), ("moe",))]
)
def test_a_leaf_outside_of_blocks_is_one_unit(named) -> None:
    """Also where the list is named that it calls its experts from."""
    model = Mixture()
    assert "moe.experts.3" in units_of(model), "experts are blocks of their own"
    expected = {"first": under(model, "first"), "moe": under(model, "moe"), "last": under(model, "last")}
    assert units_of(model, named=named) == expected
    assert not get_z3_leaf_modules(model), "a plan alone marks nothing"
    apply_leaf_modules(model, named)
    assert len(get_z3_leaf_modules(model)) == 1
    assert units_of(model) == expected


def test_a_copy_of_a_leaf_is_one() -> None:
    model = nn.Sequential(Experts(), Experts())
    set_z3_leaf_module(model[0], True)
    copied = copy.deepcopy(model)
    assert get_z3_leaf_modules(copied) == [copied[0]]
    assert copied.state_dict().keys() == model.state_dict().keys()
    set_z3_leaf_module(copied[0], False)
    assert get_z3_leaf_modules(model) == [model[0]]


def test_a_leaf_is_not_cut() -> None:
    block = Mixture()
    model = nn.Sequential(block, nn.Linear(2, 2))
    limit = WIDTH * WIDTH
    assert "0.moe.experts.1" in units_of(model, limit)
    set_z3_leaf_modules(model, [Experts])
    units = units_of(model, limit)
    assert units["0.moe"] == under(model, "0.moe")
    assert "0.first" in units, "its neighbour is cut"
    set_z3_leaf_module(block, True)
    assert set(units_of(model, limit)) == {"0", "1"}
    set_z3_leaf_module(block, False)
    set_z3_leaf_module(block.moe, False)
    assert "0.moe.experts.1" in units_of(model, limit)


def test_the_whole_model_may_be_one() -> None:
    model = Mixture()
    set_z3_leaf_module(model, True)
    assert units_of(model) == {"": under(model, "")}


def test_the_configuration_names_them(caplog) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 3, "leaf_module": {"classes": "Experts", "names": ["nowhere"]}},
    }
    model = Mixture()
    with caplog.at_level(logging.WARNING), infinity.initialize(model, config)[0]:
        assert get_z3_leaf_modules(model) == [model.moe]
    assert "names modules that the model does not have: ['nowhere']" in caplog.text
    config["zero_optimization"]["leaf_module"] = {"classes": [3]}
    with pytest.raises(infinity.ConfigError, match=r"zero_optimization\.leaf_module\.classes.*a list of names"):
        infinity.initialize(Mixture(), config)


def train(stages: list[int], orders: list[list[list[int]]], path: Path) -> list[dict[str, torch.Tensor]]:
    """Parameters after steps in which each rank uses the experts that are its own."""
    found = []
    for stage in stages:
        nvme = {"device": "nvme", "nvme_path": str(path)}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage, "leaf_module": {"classes": ["Experts"]}}
            | ({"offload_param": nvme, "offload_optimizer": nvme} if stage == 3 else {}),
        }
        with infinity.initialize(Mixture(), config)[0] as engine:
            for order in orders:
                engine.backward(engine(torch.ones(2, WIDTH), order[dist.get_rank()]))
                engine.step()
            found.append({name: param.clone() for name, param in engine.named_parameters()})
    return found


def test_ranks_use_different_experts(tmp_path) -> None:
    orders = [[[0], [1]], [[1, 2], [3]], [[3, 0], [0, 3]], [[], [2]]]
    (tmp_path / "swap").mkdir()
    results = run_ranks(2, train, [0, 1, 2, 3], orders, tmp_path / "swap", path=tmp_path)
    model = Mixture()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for order in orders:
        optimizer.zero_grad()  # experts that no rank uses have none, and are not updated
        for used in order:
            (model(torch.ones(2, WIDTH), used) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for result in results:
        for params in result:
            for name, wanted in model.named_parameters():
                torch.testing.assert_close(params[name], wanted, rtol=1e-5, atol=1e-6)
