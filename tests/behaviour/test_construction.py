"""A model that is built without memory gets the values that a model built in memory would have got, statistically."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

import infinity
from infinity.zero.meta import construct_on_meta
from tests.behaviour.reference import Placement, Recipe

CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=512, n_positions=64),
    "llama": LlamaConfig(
        hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=4, vocab_size=512
    ),
    "qwen": Qwen2Config(
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        tie_word_embeddings=True,
    ),
}
SIGMAS = 6


def build(name: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(CONFIGS[name])
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    with infinity.initialize(model=model, config=Recipe().config(Placement()))[0] as engine:
        return dict(engine.named_parameters())


def built_on_meta(name: str, seed: int) -> dict[str, torch.Tensor]:
    with construct_on_meta():
        model = build(name)
    assert all(param.is_meta for param in model.parameters())
    torch.manual_seed(seed)
    return values(model)


def assert_same_distribution(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if not float(expected.std()):
        assert torch.equal(got, expected), name  # biases and norms
        return
    numel, std = expected.numel(), float(expected.std())
    assert abs(float(got.mean() - expected.mean())) < SIGMAS * std * math.sqrt(2 / numel), name
    assert abs(float(got.std()) / std - 1) < SIGMAS / math.sqrt(numel), name
    # the shape too: the share of values within one standard deviation tells a normal from a uniform distribution
    shares = [float((values.abs() < std).float().mean()) for values in (got, expected)]
    assert abs(shares[0] - shares[1]) < SIGMAS * math.sqrt(0.5 / numel), name


@pytest.mark.parametrize("name", CONFIGS)
def test_meta_construction_draws_from_the_same_distributions(name) -> None:
    torch.manual_seed(1)
    expected = values(build(name))
    got = built_on_meta(name, seed=2)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key].shape == value.shape
        assert_same_distribution(key, got[key], value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_seed_decides_every_value(name) -> None:
    first, again, other = (built_on_meta(name, seed) for seed in (3, 3, 4))
    for key, value in first.items():
        assert torch.equal(again[key], value), key
        assert float(value.std()) == 0 or not torch.equal(other[key], value), key


def test_no_two_parameters_share_their_random_numbers() -> None:
    got = built_on_meta("llama", seed=3)
    seen: list[tuple[str, torch.Tensor]] = []
    for key, value in got.items():
        if not float(value.std()):
            continue
        sample = value.flatten()[:1000]
        for other, there in seen:
            assert not torch.equal(sample, there), f"{key} and {other}"
        seen.append((key, sample))


def test_what_no_rule_initialises_is_refused_by_name() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with construct_on_meta():
        model = nn.Sequential(nn.Linear(3, 3), Strange())
    with pytest.raises(infinity.ConfigError, match="Strange holds parameters on the meta device"):
        infinity.initialize(model=model, config=Recipe().config(Placement()))
