"""Small real architectures, and the plain PyTorch loop that every placement is held against."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import infinity
from infinity.config import parse_size
from infinity.tiers import Link

VOCAB, SEQ, BATCH = 128, 32, 2
LR, WEIGHT_DECAY = 1e-3, 0.1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tiny_gpt2(seed: int = 0, blocks: int = 3) -> nn.Module:
    """Blocks of one size, tied embeddings."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=blocks,
        n_embd=64,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=SEQ,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def tiny_llama(seed: int = 0) -> nn.Module:
    """Three blocks, separate head, grouped-query attention, rotary frequencies in a buffer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {"gpt2": tiny_gpt2, "llama": tiny_llama}


def batches(count: int, seed: int = 1) -> list[torch.Tensor]:
    """Arithmetic progressions: something that a few steps learn from."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, VOCAB, (count, BATCH, 1), generator=generator)
    strides = torch.randint(1, 4, (count, BATCH, 1), generator=generator)
    return list((starts + strides * torch.arange(SEQ)) % VOCAB)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


@dataclass(frozen=True)
class Recipe:
    """What is trained, without saying where its states live."""

    precision: str = "fp32"
    accumulation: int = 1
    clipping: float = 0.0
    steps: int = 20
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, placement: Placement, stage: int = 3) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", "initial_scale_power": 10},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {
                "stage": stage,
                # small enough that the embeddings of the test models move too
                "stage3_param_persistence_threshold": 1000,
                "offload_param": {"device": placement.params},
                "offload_optimizer": {"device": placement.optimizer},
            },
            "tiering": {"tile_size": placement.tile_size, "update_schedule": placement.schedule},
        }
        if "nvme" in (placement.params, placement.optimizer):
            config["tiering"]["nvme"] = [{"path": str(placement.path)}]
        if placement.host_memory is not None:
            config["tiering"]["host_memory"] = placement.host_memory
        if stage < 3:
            del config["zero_optimization"]["offload_param"]
        if stage == 0:
            del config["zero_optimization"]["offload_optimizer"]
        return config | self.extra


@dataclass(frozen=True)
class Placement:
    """Where the states live."""

    params: str = "none"
    optimizer: str = "none"
    path: Path | None = None
    tile_size: str | int = "256KiB"
    host_memory: str | int | None = None
    schedule: str = "auto"


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, torch.Tensor]


def train_on(engine: infinity.Engine, data: list[torch.Tensor]) -> list[float]:
    """Train on these batches; their losses."""
    losses = []
    for ids in data:
        loss = loss_of(engine, ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained_on(engine: infinity.Engine, data: list[torch.Tensor]) -> Result:
    """Train on these batches; their losses, and the weights afterwards."""
    return Result(train_on(engine, data), dict(engine.named_parameters()))


def train(model: nn.Module, recipe: Recipe, placement: Placement, link: Link | None = None, **tiering: Any) -> Result:
    """Train with infinity."""
    config = recipe.config(placement)
    config["tiering"] |= tiering
    with infinity.initialize(model=model, config=config, link=link)[0] as engine:
        return trained_on(engine, batches(recipe.steps * recipe.accumulation))


def train_plainly(model: nn.Module, recipe: Recipe) -> Result:
    """Train with a plain loop: torch's AdamW on fp32 weights, or on the fp32 masters of 16-bit ones.

    fp16 has a loss scale of 1024, and skips no step; test_fp16.py has a loop that does.
    """
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    params = list(model.parameters())
    for param in params:
        param.data = param.data.to(DTYPES[recipe.precision])
    scale = 1024.0 if recipe.precision == "fp16" else 1.0
    trained = [(m, p) for m, p in zip(masters, params, strict=True) if p.requires_grad]
    optimizer = torch.optim.AdamW([m for m, _ in trained], lr=LR, weight_decay=WEIGHT_DECAY)
    losses = []
    for index, ids in enumerate(batches(recipe.steps * recipe.accumulation)):
        loss = loss_of(model, ids)
        share = loss / recipe.accumulation
        (share if scale == 1.0 else share.float() * scale).backward()
        losses.append(loss.item())
        for master, param in trained:
            if param.grad is not None:
                grad = param.grad.float() / scale
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None
        if (index + 1) % recipe.accumulation:
            continue
        if recipe.clipping:
            torch.nn.utils.clip_grad_norm_([m for m, _ in trained], recipe.clipping)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, param in trained:
                param.copy_(master)
    return Result(losses, {name: p.detach().clone() for name, p in model.named_parameters()})


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


def assert_same_bits(found: Result, expected: Result) -> None:
    assert found.losses == expected.losses
    assert_same_weights(found.weights, expected.weights)


def least_memory(model: nn.Module, config: dict[str, Any], key: str = "host_memory", **given: Any) -> int:
    """The least budget in which a configuration trains the model, as the refusal of a smaller one states it."""
    try:
        infinity.initialize(model=model, config=config | {"tiering": config["tiering"] | {key: 1}}, **given)
    except infinity.CapacityError as refusal:
        return named_budget(refusal)
    raise AssertionError(f"a {key} of one byte was not refused")


def named_budget(refusal: BaseException) -> int:
    """The bytes that a refusal asks for, of the budget that it names."""
    found = re.search(r"raise \S+ to (\S+) ", str(refusal), re.IGNORECASE)
    assert found is not None, refusal
    return parse_size(found[1])
