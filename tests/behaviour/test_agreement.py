"""Ranks that are not given the same all refuse, and every one of them says what differs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import infinity
from infinity.zero.agreement import configuration_facts
from tests.api.small_models import CONFIG, WIDTH
from tests.behaviour.ranks import run_ranks

Arguments = tuple[nn.Module, dict[str, Any]]


def plain() -> Arguments:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), dict(CONFIG)


def with_config(**more: Any) -> Callable[[], Arguments]:
    return lambda: (plain()[0], CONFIG | more)


def with_model(*modules: nn.Module) -> Callable[[], Arguments]:
    return lambda: (nn.Sequential(*modules), dict(CONFIG))


def frozen() -> Arguments:
    model, config = plain()
    model[1].bias.requires_grad_(False)  # type: ignore[union-attr]
    return model, config


def double() -> Arguments:
    return plain()[0].double(), dict(CONFIG)


# What rank 1 is given, and what all are told.
CASES: list[tuple[Callable[[], Arguments], str]] = [
    (with_config(gradient_clipping=1.0), "rank 1 differs in its configuration: gradient_clipping is 1.0 and 0.5 on ra"),
    (with_config(optimizer={"type": "AdamW", "params": {"lr": 1.0}}), "optimizer.params.lr is 1.0 and 0.01 on rank 0"),
    (with_config(zero_optimization={"stage": 2}), "zero.stage is 2 and 3 on rank 0"),
    (with_config(no_such_key=1), "no_such_key"),
    (frozen, "parameter `1.bias` is 'frozen, of shape (64,)' and 'trained, of shape (64,)' on rank 0"),
    (
        with_model(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)),
        "parameter `0.weight` is 'trained, of shape (32, 64)' and",
    ),
    (with_model(nn.Linear(WIDTH, WIDTH)), "it has no parameter `1.weight`, which rank 0 has"),
    (
        with_model(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        "it has module `2`, which rank 0 does not have",
    ),
    (double, "parameter `0.weight` is float64"),
]


def refuse_all() -> list[str]:
    told = []
    for differing, _ in CASES:
        model, config = differing() if dist.get_rank() == 1 else plain()
        with pytest.raises(infinity.ConfigError) as refused:
            infinity.initialize(model=model, config=config)
        told.append(str(refused.value))
    model, config = plain()
    config["optimizer"] = {"type": "AdamW", "params": {"lr": (1, 1.0)[dist.get_rank()]}}  # the same number
    with infinity.initialize(model=model, config=config)[0] as engine:  # nothing is left of the others
        engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
        engine.step()
    return told


def test_all_ranks_refuse_what_differs_on_one_and_name_it(tmp_path) -> None:
    for told in run_ranks(2, refuse_all, path=tmp_path):
        for message, (_, expected) in zip(told, CASES, strict=True):
            assert expected in message, message


# Hyper-parameters that change between steps #

EVICTED = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
RULES: list[tuple[dict[str, Any], bool]] = [  # what is configured, and whether training can go on
    ({"tiering": {"update_schedule": "deferred"}}, True),
    ({"tiering": {"update_schedule": "speculative"}}, True),
    ({"tiering": {"update_schedule": "backward"}, "gradient_clipping": 0.0} | EVICTED, False),
    ({"zero_optimization": {"stage": 0}}, True),
    ({"zero_optimization": {"stage": 2}, "communication": {"shard_size": 1}}, True),
]


def train_with_own_rates() -> list[tuple[str, dict[str, torch.Tensor]]]:
    found = []
    for more, goes_on in RULES:
        model, config = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), dict(CONFIG)
        with infinity.initialize(model=model, config=config | more)[0] as engine:

            def step(engine: infinity.Engine = engine) -> None:
                engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
                engine.step()

            step()
            group = engine.optimizer.param_groups[0]
            before, group["lr"] = group["lr"], group["lr"] * (0.1 if dist.get_rank() else 1)
            with pytest.raises(infinity.ConfigError) as refused:
                step()
            weights = {}
            group["lr"] = before
            if goes_on:
                step()
                assert engine.global_steps == 2
                weights = dict(engine.named_parameters())
            else:
                with pytest.raises(infinity.InfinityError, match="has stopped after an error"):
                    step()
            found.append((str(refused.value), weights))
    return found


def test_ranks_with_rates_of_their_own_are_told_and_train_no_models_of_their_own(tmp_path) -> None:
    for here, there in zip(*run_ranks(2, train_with_own_rates, path=tmp_path), strict=True):
        assert "rank 1 differs in its optimizer: `lr` of group 0 is 0.001 and 0.01 on rank 0. A sched" in here[0]
        assert there[0] == here[0]
        assert all(torch.equal(weight, there[1][name]) for name, weight in here[1].items())


# What rank 1 alone cannot have of its machine, what it says itself, and the error.
LACKS: list[tuple[dict[str, Any], str, type[infinity.InfinityError]]] = [
    ({"host_memory": "16KiB"}, "Raise tiering.host_memory", infinity.CapacityError),
    ({"nvme": [{"path": "file"}]}, "file", infinity.StorageError),
    ({"nvme": [{"path": ".", "capacity": "4KiB"}], "host_memory": "280KiB"}, "capacity", infinity.StorageError),
]


def refuse_what_one_lacks(drive: Path) -> list[str]:
    told = []
    offload = {"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}}
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0, **offload}
    for lacking, _, error in LACKS:
        tiering: dict[str, Any] = {"nvme": [{"path": "."}]}
        if dist.get_rank() == 1:
            tiering |= lacking
        tiering["nvme"] = [nvme | {"path": str(drive / nvme["path"])} for nvme in tiering["nvme"]]
        model, config = plain()
        config |= {"zero_optimization": stage, "tiering": tiering}
        with pytest.raises(error if dist.get_rank() == 1 else infinity.RankError) as refused:
            infinity.initialize(model=model, config=config)
        told.append(str(refused.value))
        dist.barrier()
        assert list(drive.iterdir()) == [drive / "file"]
    model, config = plain()
    config |= {"zero_optimization": stage, "tiering": {"nvme": [{"path": str(drive)}]}}
    with infinity.initialize(model=model, config=config)[0] as engine:  # nothing is left of the others
        engine.backward(engine(torch.randn(4, WIDTH)).square().mean())
        engine.step()
    return told


def test_what_one_rank_lacks_is_refused_by_all_with_its_words(tmp_path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "drive" / "file").touch()
    first, second = run_ranks(2, refuse_what_one_lacks, tmp_path / "drive", path=tmp_path)
    for there, here, (_, words, _) in zip(first, second, LACKS, strict=True):
        assert words in here, here
        assert there == f"rank 1: {here}"


def start_with_own_budgets() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("infinity.zero.agreement").addHandler(handler)
    model, config = plain()
    config["tiering"] = {"host_memory": f"{64 + dist.get_rank()}MiB"}
    infinity.initialize(model=model, config=config)[0].close()
    return said


def test_budgets_may_differ_and_rank_0_says_so(tmp_path) -> None:
    first, second = run_ranks(2, start_with_own_budgets, path=tmp_path)
    assert second == []
    assert len(first) == 1
    assert first[0].startswith(
        "rank 1 has budgets of its own: host memory 65.00 MiB and device memory auto, where rank 0"
    )


def test_what_each_machine_has_of_its_own_is_not_compared() -> None:
    config = infinity.config.load_config(CONFIG)
    names = configuration_facts(config).keys()
    assert {"train_batch_size", "zero.stage", "tiering.state_format", "optimizer.params.lr"} <= names
    assert not [name for name in names if "memory" in name or "nvme" in name or name.startswith("aio.")]
