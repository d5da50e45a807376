"""`initialize` places a model or says why not, and a model that it refused is as it was."""

from __future__ import annotations

import argparse
import copy
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.zero.executor import Executor
from infinity.zero.meta import construct_on_meta
from infinity.zero.param_access import claim
from infinity.zero.partition import ParamInfo, UnitLayout
from tests.behaviour.disks import FailingDisk, swap_on
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import LR, Placement, Recipe, batches, least_memory, tiny_gpt2, tiny_llama, train_on

FP32, BF16, FP16 = Recipe("fp32"), Recipe("bf16"), Recipe("fp16")


def config_for(recipe: Recipe = FP32, **more: Any) -> dict[str, Any]:
    return recipe.config(Placement()) | more


def without_optimizer(recipe: Recipe = FP32, placement: Placement | None = None) -> dict[str, Any]:
    config = recipe.config(placement or Placement())
    del config["optimizer"]
    return config


# What is no model, no configuration, no optimizer #

MODEL = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": None, "config": {}}, "`model` is None; give initialize an nn.Module"),
        ({"model": "gpt2", "config": {}}, "`model` is a str"),
        ({"model": {}, "config": MODEL}, "the order is initialize(model, config, ...)"),
        ({"model": argparse.Namespace(), "config": MODEL}, "the order is initialize(model, config, ...)"),
        ({"model": MODEL, "config": None}, "`config` is None; give a JSON file's path"),
        ({"model": MODEL, "config": {}, "optimizer": "AdamW"}, "`optimizer` is a str; give a torch optimizer"),
        ({"model": nn.ReLU(), "config": {"train_batch_size": 1}}, "no floating-point parameters"),
        ({"model": nn.Linear(2, 2).requires_grad_(False), "config": {"train_batch_size": 1}}, "nothing to train"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_words(arguments, words) -> None:
    with pytest.raises(infinity.ConfigError, match=re.escape(words)):
        infinity.initialize(**arguments)


@pytest.mark.parametrize("betas", [(1.5, 0.9), (0.9, 1.0), (math.nan, 0.9), (-0.1, 0.9)])
def test_moments_that_do_not_decay_are_refused(betas) -> None:
    config, words = {"train_batch_size": 1}, re.escape(f"betas are ({betas[0]}, {betas[1]}); each must be")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "betas": betas}])
    with pytest.raises(infinity.ConfigError, match=words):
        infinity.initialize(model=model, config=config, optimizer=optimizer)
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, optimizer=torch.optim.AdamW)
    with engine:
        before = dict(engine.named_parameters())
        optimizer.param_groups[0]["betas"] = betas
        loss = engine(torch.ones(1, 2)).sum()
        with pytest.raises(infinity.ConfigError, match=words):
            engine.backward(loss)
        assert all(torch.equal(value, before[name]) for name, value in engine.named_parameters())


def test_an_optimizer_of_frozen_parameters_is_refused() -> None:
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(infinity.ConfigError, match="no parameter of `optimizer` requires a gradient"):
        infinity.initialize(model, without_optimizer(), optimizer=torch.optim.AdamW(model.parameters()))


# infinity's own optimizers #


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_infinitys_optimizers_are_taken_over_as_torchs_are(name, tmp_path) -> None:
    losses = []
    for module, more in ((torch.optim, {}), (infinity.optim, {"offload": "nvme", "nvme_path": tmp_path})):
        model = tiny_llama()
        decayed, plain = (list(model.parameters())[part::2] for part in (0, 1))
        groups = [{"params": decayed, "weight_decay": 0.1, "lr": 3 * LR}, {"params": plain}]
        given = getattr(module, name)(groups, lr=LR, weight_decay=0.0, betas=(0.8, 0.99), **more)
        with infinity.initialize(model, without_optimizer(), optimizer=given)[0] as engine:
            assert not any(tmp_path.rglob("*.swap*"))  # its files are gone
            losses.append(train_on(engine, batches(5)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, infinity.optim.AdamW])
def test_states_that_cannot_be_taken_over_are_refused(kind) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    config = {"train_batch_size": 1}
    infinity.initialize(copy.deepcopy(model), config | {"optimizer": {"type": "Adam"}})[0].close()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(infinity.ConfigError, match=f"{kind.__name__} has taken steps, and its states cannot be taken"):
        infinity.initialize(model, config, optimizer=optimizer)


# Models whose values are elsewhere #


def test_a_model_of_a_live_engine_is_refused() -> None:
    model = tiny_llama()
    with infinity.initialize(model, config_for())[0] as engine:
        with pytest.raises(infinity.ConfigError, match=r"`model\.embed_tokens\.weight` belongs to another engine"):
            infinity.initialize(model, config_for())
        train_on(engine, batches(1))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_whose_engine_was_closed_is_refused_until_it_is_loaded(copied, stage) -> None:
    model = tiny_llama()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config = config_for() | {"zero_optimization": {"stage": stage}}
    infinity.initialize(model, config)[0].close()
    model = copy.deepcopy(model) if copied else model
    with pytest.raises(infinity.ConfigError, match=r"`model\.embed_tokens\.weight` has no values: .* was closed"):
        infinity.initialize(model, config)
    model.load_state_dict(state, assign=True)
    with infinity.initialize(model, config)[0] as engine:
        assert all(torch.equal(value, state[name]) for name, value in engine.named_parameters())


class Dropped:
    """An owner that is gone before it was closed."""

    def begin_gathering(self) -> Any:
        raise AssertionError


def test_a_model_whose_engine_was_dropped_is_refused() -> None:
    model = nn.Linear(2, 2)
    info = ParamInfo("weight", (2, 2), 4, 0, True, 0)
    owner = Dropped()
    claim(owner, model, [UnitLayout(0, "", (info,), 4, 4, False)])
    del owner
    with pytest.raises(infinity.ConfigError, match=r"`weight` has no values: .* dropped without close\(\)"):
        infinity.initialize(model, {"train_batch_size": 1, "optimizer": {"type": "Adam"}})


def test_a_scalar_parameter_of_a_closed_engine_is_known_too() -> None:
    model = nn.ParameterDict({"scale": torch.tensor(2.0)})
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    infinity.initialize(model, config)[0].close()
    with pytest.raises(infinity.ConfigError, match="`scale` has no values"):
        infinity.initialize(model, config)


# A failed initialize #


@dataclass
class Seen:
    """A parameter or buffer as it was."""

    tensor: torch.Tensor
    values: torch.Tensor
    stride: tuple[int, ...]
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Seen:
        return Seen(tensor, tensor.detach().clone(), tensor.stride(), tensor.requires_grad)

    def assert_same(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor is self.tensor, name
        assert (tensor.dtype, tensor.device, tensor.shape) == (self.values.dtype, self.values.device, self.values.shape)
        assert (tensor.stride(), tensor.requires_grad) == (self.stride, self.requires_grad), name
        if not tensor.is_meta:
            assert torch.equal(tensor, self.values), name


class Snapshot:
    """Everything of a model that `initialize` could have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {name: Seen.of(tensor) for name, tensor in self._tensors().items()}
        self.hooks = self._hooks()

    def _tensors(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        return dict(named) | dict(self.model.named_buffers(remove_duplicate=False))

    def _hooks(self) -> list[int]:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        modules = [len(getattr(module, kind)) for module in self.model.modules() for kind in kinds]
        return modules + [len(param._post_accumulate_grad_hooks or ()) for param in self.model.parameters()]

    def assert_unchanged(self) -> None:
        now = self._tensors()
        assert list(now) == list(self.tensors)
        for name, seen in self.tensors.items():
            seen.assert_same(name, now[name])
        assert self._hooks() == self.hooks


def mixed_model() -> nn.Module:
    """Tied weights, frozen ones that 16 bits do not hold, some in 16 bits, a strided one, integers, statistics."""
    model = tiny_gpt2()
    model.transformer.h[0].attn.requires_grad_(False)
    model.transformer.h[1].mlp.to(torch.bfloat16).requires_grad_(False)
    model.transformer.h[1].ln_1.to(torch.bfloat16)
    weight = model.transformer.h[2].mlp.c_fc.weight
    weight.data = weight.data.t().contiguous().t()
    model.quantised = nn.Parameter(torch.arange(8, dtype=torch.int8), requires_grad=False)
    model.norm = nn.BatchNorm1d(4)
    return model


def on_meta() -> nn.Module:
    with construct_on_meta():
        return tiny_gpt2()


class Stopped(BaseException):
    """Such as a KeyboardInterrupt."""


def stop_at_unit(monkeypatch: pytest.MonkeyPatch, unit: int) -> None:
    """Materialising is interrupted while this unit is filled."""
    import infinity.zero.materialize as module  # noqa: PLC0415

    fill, calls = module._fill_unit, iter(range(1000))

    def interrupted(*args: Any, **options: Any) -> None:
        if next(calls) == unit:
            raise Stopped
        fill(*args, **options)

    monkeypatch.setattr(module, "_fill_unit", interrupted)


UNITS = 6


@pytest.mark.parametrize("unit", range(UNITS))
@pytest.mark.parametrize(
    ("precision", "state_format", "tier"),
    [
        ("fp32", "auto", "none"),
        ("fp32", "auto", "nvme"),
        ("bf16", "auto", "nvme"),
        ("bf16", "bf16", "cpu"),
        ("bf16", "int8", "nvme"),
        ("fp16", "auto", "nvme"),
    ],
)
def test_an_initialize_that_is_interrupted_leaves_the_model_as_it_was(
    precision, state_format, tier, unit, tmp_path, monkeypatch
) -> None:
    config = Recipe(precision).config(Placement(tier, tier, tmp_path))
    config["tiering"] |= {"state_format": state_format}
    if tier == "nvme":  # so little that units are evicted while others are placed, and again while they are read back
        config["tiering"] |= {"host_memory": least_memory(mixed_model(), config)}
    model = mixed_model()
    before = Snapshot(model)
    with monkeypatch.context() as patch:
        stop_at_unit(patch, unit)
        with pytest.raises(Stopped):
            infinity.initialize(model, config)
    before.assert_unchanged()
    assert not any(tmp_path.rglob("*.swap*"))
    if unit == UNITS - 1:
        losses = []
        for trained in (model, mixed_model()):
            with infinity.initialize(trained, config)[0] as engine:
                losses.append(train_on(engine, batches(2)))
        assert losses[0] == losses[1]


def _failing_dataset() -> Any:
    return object()


def _failing_scheduler(_: object) -> Any:
    raise ZeroDivisionError("a scheduler's own")


@pytest.mark.parametrize("build", [mixed_model, on_meta])
@pytest.mark.parametrize(
    ("tiering", "more", "error"),
    [
        ({"host_memory": 1}, {}, infinity.CapacityError),
        ({}, {"lr_scheduler": _failing_scheduler}, ZeroDivisionError),
        ({}, {"training_data": _failing_dataset()}, TypeError),
        ({"nvme": [{"path": "/proc/nowhere"}]}, {}, (infinity.StorageError, infinity.ConfigError)),
    ],
    ids=["capacity", "scheduler", "dataset", "drive"],
)
def test_a_later_phase_that_fails_leaves_the_model_as_it_was(build, tiering, more, error, tmp_path) -> None:
    config = FP32.config(Placement("nvme", "nvme", tmp_path))
    config["tiering"] |= tiering
    model = build()
    before = Snapshot(model)
    with pytest.raises(error):
        infinity.initialize(model, config, **more)
    before.assert_unchanged()


@pytest.mark.parametrize("part", ["UpdatePipeline", "Executor", "Monitor"])
def test_a_runtime_that_cannot_be_completed_leaves_no_file_and_no_thread(part, monkeypatch, tmp_path) -> None:
    def fail(*_: object, **__: object) -> None:
        assert any(tmp_path.iterdir())
        raise infinity.InfinityError("on purpose")

    before = set(threading.enumerate())
    monkeypatch.setattr(f"infinity.zero.build.{part}", fail)
    with pytest.raises(infinity.InfinityError, match="on purpose"):
        infinity.initialize(tiny_llama(), FP32.config(Placement("nvme", "nvme", tmp_path)))
    assert not any(tmp_path.iterdir())
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("infinity-")]


def test_a_model_that_the_engine_refuses_keeps_no_hooks() -> None:
    model = nn.Module()
    model.one, model.other = nn.Linear(4, 4), nn.BatchNorm1d(4)
    config = config_for(gradient_accumulation_steps=2)
    config["tiering"] |= {"accumulation": "layer"}
    before = Snapshot(model)
    with pytest.raises(infinity.ConfigError, match="is no sequence of blocks"):
        infinity.initialize(model, config)
    before.assert_unchanged()


def test_a_meta_model_whose_weights_end_early_is_on_meta_again() -> None:
    class Ends:
        left = 5

        def __contains__(self, name: str) -> bool:
            return True

        def read(self, name: str) -> torch.Tensor:
            self.left -= 1
            if not self.left:
                raise OSError("the drive is gone")
            return torch.zeros(known[name])

    model = on_meta()
    known = {name: param.shape for name, param in model.named_parameters()}
    before = Snapshot(model)
    with pytest.raises(OSError, match="the drive is gone"):
        infinity.initialize(model, config_for(), weights=Ends())
    before.assert_unchanged()


def test_values_that_a_dead_drive_keeps_are_missed_by_name(tmp_path, monkeypatch, caplog) -> None:
    config = FP32.config(Placement("nvme", "nvme", tmp_path))
    config["tiering"] |= {"host_memory": least_memory(tiny_gpt2(), config)}
    model, dead = tiny_gpt2(), []

    def dies(_: object) -> Any:
        dead.append(True)
        raise Stopped

    swap_on(monkeypatch, lambda engine: FailingDisk(engine, lambda *_: bool(dead)))
    with pytest.raises(Stopped):
        infinity.initialize(model, config, lr_scheduler=dies)
    assert "cannot be read back; the model is left without them" in caplog.text
    with pytest.raises(infinity.ConfigError, match="has no values"):
        infinity.initialize(model, config)


def _fail_on_ranks(build: Callable[[], nn.Module]) -> bool:
    model = build()
    before = Snapshot(model)
    with pytest.raises(ZeroDivisionError):
        infinity.initialize(model, config_for(BF16), lr_scheduler=_failing_scheduler)
    before.assert_unchanged()
    return True


@pytest.mark.parametrize("build", [mixed_model, on_meta])
def test_on_several_ranks_it_leaves_the_model_as_it_was(build, tmp_path: Path) -> None:
    assert all(run_ranks(2, _fail_on_ranks, build, path=tmp_path))


def test_an_engine_that_fails_as_the_last_thing_leaves_nothing_on_the_model(monkeypatch) -> None:
    def fail(self: Executor) -> None:
        raise infinity.InfinityError("on purpose")

    model = nn.Linear(2, 2)
    before, values = set(vars(model)), model.weight.detach().clone()
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}}
    with monkeypatch.context() as patched:
        patched.setattr(Executor, "show_newest", fail)
        with pytest.raises(infinity.InfinityError, match="on purpose"):
            infinity.initialize(model, config)
    assert set(vars(model)) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model.weight, values)
    with infinity.initialize(model, config)[0] as engine:
        assert torch.equal(dict(engine.named_parameters())["weight"], values)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscript_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(infinity.ConfigError, match=r"module `1` \(RecursiveScriptModule\) is TorchScript"):
        infinity.initialize(model=model, config={"train_batch_size": 1})
