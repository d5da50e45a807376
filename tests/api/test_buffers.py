"""What lies outside of the units: statistics of normalisations, other buffers, and parameters of integers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.integrations.exports import save_pretrained
from infinity.tiers import SameMemory
from tests.behaviour.ranks import run_ranks
from tests.behaviour.reference import DTYPES, LR, Placement, Recipe

STEPS = 4


class Norms(nn.Module):
    """Normalisations with statistics: of batches with weights and without, of instances, shared in training."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8, affine=False))
        self.third = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.cumulative = nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("table", torch.full((8, 1), 1 / 3))
        self.register_buffer("frequencies", torch.full((8, 1), 1 / 3), persistent=False)
        self.checkpointed = checkpointed

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.checkpointed and self.training:
            values = checkpoint(self.first, values, use_reentrant=False)
        else:
            values = self.first(values)
        return self.cumulative(self.third(self.second(values) + self.table.to(values.dtype)))


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 6, generator=generator) * 3 + 1).to(dtype) for _ in range(STEPS)]


def plainly(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights in 16 bits with float32 masters; statistics, and the arithmetic of normalisations, in float32."""
    model = Norms()
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.1)
    model.table = model.table.to(dtype)
    for values in inputs(dtype):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.data = master.to(dtype)
        for norm in norms:  # in float32, with the values of 16 bits
            for param in norm.parameters():
                param.data = param.data.float()
        model(values).square().mean().backward()
        for param, master in zip(model.parameters(), masters, strict=True):
            master.grad = param.grad.to(dtype).float()
            param.grad = None
        optimizer.step()
    return {name: buffer for name, buffer in model.named_buffers() if "running" in name}


def train(model: nn.Module, precision: str, more: dict[str, Any], **arguments: Any) -> infinity.Engine:
    config = Recipe(precision).config(Placement()) | {"zero_optimization": {"stage": 3}} | more
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}
    engine = infinity.initialize(model, config, **arguments)[0]
    for values in inputs(DTYPES[precision]):
        engine.backward(engine(values).square().mean())
        engine.step()
    return engine


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_statistics_are_float32_whatever_the_parameters_are(precision, checkpointed, discrete) -> None:
    if checkpointed:
        model, expected = Norms(checkpointed=True), None  # its statistics count twice, as torch's do
    else:
        model, expected = Norms(), plainly(DTYPES[precision])
    link = {"link": SameMemory()} if discrete else {}
    with train(model, precision, {}, **link) as engine:
        for name, buffer in model.named_buffers():
            if "running" in name:
                assert buffer.dtype == torch.float32, name
                assert not torch.equal(buffer, buffer.to(DTYPES[precision]).float()), name
                if expected is not None:
                    torch.testing.assert_close(buffer, expected[name], rtol=1e-4, atol=1e-4)
        assert model.table.dtype == DTYPES[precision]
        assert model.frequencies.dtype == torch.float32
        assert all(isinstance(param, nn.Parameter) for param in model.parameters())
        with torch.no_grad():
            outputs = engine.eval()(inputs(DTYPES[precision])[0])
        assert outputs.dtype == DTYPES[precision]
        assert bool(outputs.isfinite().all())


def test_small_changes_of_statistics_are_not_rounded_away() -> None:
    """A step moves a statistic of 256 by less than bf16 has at that size."""
    norm = nn.BatchNorm1d(2, momentum=0.01)
    norm.running_mean.fill_(256.0)
    config = Recipe("bf16").config(Placement())
    with infinity.initialize(norm, config)[0] as engine:
        for _ in range(5):
            engine.backward(engine(torch.full((4, 2), 255.0).bfloat16() + torch.eye(4, 2).bfloat16()).sum())
            engine.step()
        assert bool((norm.running_mean < 256).all())
        assert bool((norm.running_mean > 255.8).all())


def test_a_forward_that_fails_leaves_the_parameters_in_their_module() -> None:
    model = Norms()
    with train(model, "bf16", {}) as engine:
        with pytest.raises(RuntimeError, match=r"running_mean should contain 5 elements"):
            model.first[1](torch.ones(4, 5, 6, dtype=torch.bfloat16))
        assert all(
            type(param) is nn.Parameter
            for module in model.modules()
            for param in module._parameters.values()
            if param is not None
        )
        engine.eval()


def test_checkpoints_with_rounded_statistics_load(tmp_path) -> None:
    """Such as were saved when statistics were cast with the parameters."""
    with train(Norms(), "bf16", {}) as engine:
        rounded = {}
        for name, module in engine.module.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.running_mean = module.running_mean.bfloat16()
                rounded[name] = module.running_mean.clone()
        engine.save_checkpoint(tmp_path)
    model = Norms()
    with infinity.initialize(model, Recipe("bf16").config(Placement()))[0] as engine:
        engine.load_checkpoint(tmp_path)
        for name, values in rounded.items():
            assert model.get_submodule(name).running_mean.dtype == torch.float32
            assert torch.equal(model.get_submodule(name).running_mean, values.float())


def test_a_buffer_that_modules_share_is_shared_afterwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in model:
        module.register_buffer("table", torch.ones(3) if module is model[0] else model[0].table)
    with infinity.initialize(model, Recipe("bf16").config(Placement()))[0]:
        assert model[0].table is model[1].table
        assert model[0].table.dtype == torch.bfloat16


class Quantised(nn.Module):
    """A frozen base of integers beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(-8, 8, dtype=torch.int8).view(4, 4), requires_grad=False)
        self.adapter = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.adapter(values @ self.base.to(values.dtype))


def test_a_model_with_integer_parameters_trains_and_keeps_them() -> None:
    model = Quantised()
    base = model.base.detach().clone()
    with infinity.initialize(model, Recipe("bf16").config(Placement()))[0] as engine:
        engine.backward(engine(torch.ones(2, 4).bfloat16()).square().mean())
        engine.step()
        assert torch.equal(model.base, base)
    assert torch.equal(model.base, base)


class EightBits(nn.Module):
    """A frozen base of codes with a scale, and a state of complex numbers, beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(16.0).view(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), 0.5).to(torch.float8_e5m2))
        self.register_buffer("turns", torch.ones(2, dtype=torch.complex64))
        self.adapter = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.adapter(values @ (self.base.to(values.dtype) * self.scale.to(values.dtype)))


@pytest.mark.parametrize("stage", [0, 3])
def test_numbers_of_eight_bits_are_codes_that_stay_as_they_are(stage, tmp_path) -> None:
    model = EightBits()
    base = model.base.detach().clone()
    config = Recipe("bf16").config(Placement()) | {"zero_optimization": {"stage": stage}}
    with infinity.initialize(model, config)[0] as engine:
        assert (model.base.dtype, model.scale.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
        engine.backward(engine(torch.ones(2, 4).bfloat16()).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.save_16bit_model(tmp_path)
        save_pretrained(engine, tmp_path / "whole", dtype=torch.float32)
        assert torch.equal(model.base.view(torch.uint8), base.view(torch.uint8))
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert (whole["base"].dtype, whole["adapter.weight"].dtype) == (torch.float8_e4m3fn, torch.float32)
    found = load_file(tmp_path / "model.safetensors")
    assert (found["scale"].dtype, found["turns"].dtype) == (torch.float8_e5m2, torch.complex64)
    assert torch.equal(found["base"].view(torch.uint8), base.view(torch.uint8))


def test_nobody_trains_in_eight_bits() -> None:
    model = EightBits()
    model.base.requires_grad_(True)
    with pytest.raises(infinity.ConfigError, match="`base` is float8_e4m3fn, which cannot be trained"):
        infinity.initialize(model, Recipe("bf16").config(Placement()))


def test_an_integer_parameter_without_values_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Quantised()
    with pytest.raises(infinity.ConfigError, match="`base` is int8 and on the meta device"):
        infinity.initialize(model, Recipe("bf16").config(Placement()))
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("placement", [Placement(), Placement("cpu", "cpu")], ids=["memory", "cpu"])
def test_a_buffer_without_values_is_refused_by_name(placement) -> None:
    """torch.device("meta") loses what modules compute in their constructors, and no rule computes it again."""
    with torch.device("meta"):
        model = Norms()
    with pytest.raises(infinity.ConfigError, match=r"buffer `table` is on the meta device.*infinity\.zero\.Init"):
        infinity.initialize(model, Recipe("bf16").config(placement))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    with infinity.zero.Init():
        model = Norms()
    infinity.initialize(model, Recipe("bf16").config(placement))[0].close()


def on_meta_beside_rank_0() -> list[torch.Tensor]:
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = Norms()
    with infinity.initialize(model, Recipe().config(Placement()))[0] as engine:
        return list(engine.module.state_dict().values())


def test_other_ranks_have_rank_0s_buffers_also_on_meta(tmp_path) -> None:
    first, second = run_ranks(2, on_meta_beside_rank_0, path=tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert torch.equal(second[list(Norms().state_dict()).index("table")], Norms().table)


def test_a_copy_in_16_bits_computes_with_its_statistics() -> None:
    """torch takes no parameters in 16 bits beside statistics in float32, as the engine's model has."""
    model = Norms()
    batch = inputs(torch.bfloat16)[0]
    with infinity.initialize(model=model, config=Recipe("bf16").config(Placement()))[0] as engine:
        engine.backward(engine(batch).float().square().mean())
        engine.step()
        copied = copy.deepcopy(engine.module).eval()
        assert copied.first[1].running_mean.dtype is torch.bfloat16
        assert model.first[1].running_mean.dtype is torch.float32
        with torch.no_grad():
            torch.testing.assert_close(copied(batch), engine.eval()(batch), rtol=0.05, atol=0.05)
