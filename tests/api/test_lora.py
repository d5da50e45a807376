"""LoRA on a base that is read from its files, unit by unit: the base has its stored values, the adapters LoRA's own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import infinity
from infinity.integrations import pretrained_model
from infinity.zero.adapters import name_before_wrapping
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2, tiny_llama, train_on

RANK = 4
TARGETS = ("q_proj", "down_proj", "lm_head")


class LoraLinear(nn.Module):
    """As PEFT has it: on the device of the base."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        device = base.weight.device
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, RANK, bias=False, device=device)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base.out_features, bias=False, device=device)})
        self.reset_lora_parameters("default", True)

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool) -> None:
        nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B[adapter_name].weight)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.base_layer(values) + self.lora_B["default"](self.lora_A["default"](values))


class LoraModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if name.rpartition(".")[2] in TARGETS:
                model.set_submodule(name, LoraLinear(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


class PeftModel(LoraModel):
    """Names and attributes of PEFT's classes."""

    def __init__(self, model: nn.Module, rule: Any) -> None:
        nn.Module.__init__(self)
        self.base_model = LoraModel(model)
        self.peft_config = {"default": SimpleNamespace(init_lora_weights=rule)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(nn.Module.__getattr__(self, "base_model"), name)


def by_hand(model: nn.Module, rule: Any = True) -> nn.Module:
    return PeftModel(model, rule)


def by_peft(model: nn.Module, rule: Any = True) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=RANK, target_modules=list(TARGETS), init_lora_weights=rule)
    return peft.get_peft_model(model, config)


def saved(path: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def bf16(path: Path) -> dict[str, Any]:
    return Recipe("bf16").config(Placement("nvme", "nvme", path))


WRAPPERS = pytest.mark.parametrize("wrap", [by_hand, by_peft])
Wrap = Callable[..., nn.Module]


@WRAPPERS
@pytest.mark.parametrize("rule", [True, "gaussian"])
def test_the_base_has_its_stored_values_and_the_adapters_begin_as_loras(wrap: Wrap, rule, tmp_path, caplog) -> None:
    stored = saved(tmp_path / "base", tiny_llama())
    model, weights = pretrained_model(tmp_path / "base")
    model = wrap(model, rule)
    torch.manual_seed(0)
    with (
        caplog.at_level(logging.WARNING),
        infinity.initialize(model, Recipe("fp32").config(Placement()), weights=weights)[0] as engine,
    ):
        values = dict(engine.named_parameters())
        first = train_on(engine, batches(4))
    assert not caplog.records
    of_base = {name: value for name, value in values.items() if ".lora_" not in name}
    assert {name_before_wrapping(name) for name in of_base} == stored.keys()
    assert all(torch.equal(value, stored[name_before_wrapping(name)]) for name, value in of_base.items())
    down = {name: value for name, value in values.items() if ".lora_A." in name}
    assert len(down) == 7
    assert all(not bool(value.any()) for name, value in values.items() if ".lora_B." in name)
    for name, value in down.items():
        std = 1 / RANK if rule == "gaussian" else 1 / math.sqrt(3 * value.shape[1])
        assert float(value.std()) == pytest.approx(std, rel=0.2), name
    assert first[0] == pytest.approx(_loss_of_base(), rel=1e-5)  # the adapters add nothing yet
    assert first[-1] != first[0]


def _loss_of_base() -> float:
    ids = batches(4)[0]
    with torch.no_grad():
        return float(tiny_llama()(input_ids=ids, labels=ids).loss)


@WRAPPERS
def test_only_the_adapters_are_trained(wrap: Wrap, tmp_path) -> None:
    stored = saved(tmp_path / "base", tiny_llama())
    model, weights = pretrained_model(tmp_path / "base")
    with infinity.initialize(wrap(model), bf16(tmp_path), weights=weights)[0] as engine:
        train_on(engine, batches(3))
        for name, value in engine.named_parameters():
            if ".lora_" not in name:
                assert torch.equal(value, stored[name_before_wrapping(name)].bfloat16()), name
            elif ".lora_B." in name:
                assert bool(value.any()), name


def test_initial_values_that_are_computed_from_the_base_are_refused(tmp_path) -> None:
    saved(tmp_path / "base", tiny_llama())
    model, weights = pretrained_model(tmp_path / "base")
    with pytest.raises(infinity.ConfigError, match=r"init_lora_weights is 'pissa'.* choose True or 'gaussian'"):
        infinity.initialize(by_hand(model, "pissa"), bf16(tmp_path), weights=weights)


def test_weights_that_have_nothing_of_the_model_are_refused_once(tmp_path, caplog) -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = model

    saved(tmp_path / "base", tiny_gpt2())
    model, weights = pretrained_model(tmp_path / "base")
    with pytest.raises(infinity.ConfigError, match=r"the weights have none .* `inner\.transformer\.h\.0\.attn\.c_attn"):
        infinity.initialize(Wrapped(model), bf16(tmp_path), weights=weights)
    assert not caplog.records


def test_parameters_without_stored_values_are_named_once(tmp_path, caplog) -> None:
    saved(tmp_path / "base", tiny_gpt2())
    model, weights = pretrained_model(tmp_path / "base")
    with torch.device("meta"):
        model.transformer.extra = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    infinity.initialize(model, bf16(tmp_path), weights=weights)[0].close()
    (record,) = caplog.records
    words = "4 parameters, such as `transformer.extra.0.bias`, are not among the stored weights"
    assert words in record.getMessage()


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.lm_head.original_module.weight", "lm_head.weight"),
        ("_orig_mod.model.layers.0._checkpoint_wrapped_module.norm.weight", "model.layers.0.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_are_those_before_wrapping(wrapped, plain) -> None:
    assert name_before_wrapping(wrapped) == plain


def test_a_copy_of_a_tied_head_that_is_trained_has_the_stored_values(tmp_path) -> None:
    """PEFT's `modules_to_save`: a copy beside the original, under the name that the file has not."""
    stored = saved(tmp_path / "base", tiny_gpt2())
    model, weights = pretrained_model(tmp_path / "base")
    copies = nn.Module()
    copies.original_module = model.lm_head
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False, device="meta")
    copies.modules_to_save = nn.ModuleDict({"default": head})
    model.lm_head = copies
    with infinity.initialize(model, bf16(tmp_path), weights=weights)[0] as engine:
        values = dict(engine.named_parameters())
    expected = stored["transformer.wte.weight"].bfloat16()
    assert torch.equal(values["lm_head.modules_to_save.default.weight"], expected)
