"""Trains a small decoder with the engine, in any placement of its states, and with plain torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from infinity.config import Precision
from infinity.kernels import torch_threads
from infinity.setup import initialize
from infinity.zero.sizing import DTYPES

VOCAB, TOKENS, ROWS, HEADS = 64, 16, 2, 4
LR, BETAS, DECAY = 1e-2, (0.9, 0.999), 0.1
EPS = 1e-2  # as large as the gradients: with a small one, Adam's steps would not show a wrong scale of gradients
SCALE_POWER = 8  # exponent of the loss scale in fp16


class Block(nn.Module):
    """Attention and a feed-forward network, of operators that every device has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(rows, tokens, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // HEADS) ** -0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
        x = x + self.project(mixed.transpose(1, 2).reshape(rows, tokens, width))
        fed: torch.Tensor = self.down(torch.relu(self.up(self.before_feed_forward(x))))
        return x + fed


class Decoder(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before it."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1)
        loss: torch.Tensor = functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        return loss


def decoder(width: int, blocks: int) -> Decoder:
    """Return a decoder with the same initial weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Decoder(width, blocks)


def batches(count: int) -> list[torch.Tensor]:
    """Return token ids in host memory, each of shape [ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(count)]


@dataclass(frozen=True)
class Recipe:
    """What is trained. `Place` says where its states are."""

    precision: Precision = "bf16"
    accumulation: int = 1
    clipping: float = 0.0
    steps: int = 3
    width: int = 64
    blocks: int = 4


@dataclass(frozen=True)
class Place:
    """Where states are, and when they are updated.

    Attributes:
        tiering, zero: additional keys for these sections of the configuration.
    """

    params: str = "none"
    states: str = "none"
    schedule: str = "auto"
    tiering: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]

    def difference(self, other: Trained) -> str:
        """Return what differs from another training, in words; empty if all bits are equal."""
        different = [name for name, values in self.weights.items() if not torch.equal(values, other.weights[name])]
        if different:
            off = max((self.weights[n].float() - other.weights[n].float()).abs().max().item() for n in different)
            return f"{len(different)} of {len(self.weights)} parameters have other bits, by up to {off:.1e}"
        if self.losses != other.losses:
            return f"the losses are {self.losses} for {other.losses}"
        return ""


def config_of(recipe: Recipe, place: Place, path: Path) -> dict[str, Any]:
    """Return the engine's configuration. `path` is a directory on a drive."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": recipe.accumulation,
        "gradient_clipping": recipe.clipping,
        "bf16": {"enabled": recipe.precision == "bf16"},
        "fp16": {"enabled": recipe.precision == "fp16", "initial_scale_power": SCALE_POWER},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {"device": place.params},
            "offload_optimizer": {"device": place.states},
        }
        | place.zero,
        "tiering": {
            "nvme": [{"path": str(path)}],
            "tile_size": "64KiB",
            "update_schedule": place.schedule,
            "fill_device": False,  # states stay where the place says
            "status": False,
        }
        | place.tiering,
    }


def train(recipe: Recipe, place: Place, device: torch.device, path: Path) -> Trained:
    """Train with the engine.

    Args:
        path: a directory on a drive.
    """
    data = [ids.to(device) for ids in batches(recipe.steps * recipe.accumulation)]
    model = decoder(recipe.width, recipe.blocks)
    losses = []
    with initialize(model=model, config=config_of(recipe, place, path), device=device)[0] as engine:
        for step in range(recipe.steps):
            # Losses are read at the end: reading one waits for the device, which would hide a missing wait elsewhere.
            losses.append(engine.train_batch(data[step * recipe.accumulation : (step + 1) * recipe.accumulation]))
        weights = {name: values.cpu() for name, values in engine.named_parameters()}
        return Trained([loss.item() for loss in losses], weights)


def train_plainly(recipe: Recipe, device: torch.device) -> list[float]:
    """Return the losses of plain torch, with master weights in float32 and a model in the recipe's precision."""
    masters = decoder(recipe.width, recipe.blocks).to(device)
    model = copy.deepcopy(masters).to(DTYPES[recipe.precision])
    adam = torch.optim.AdamW(masters.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    scale = 2.0**SCALE_POWER if recipe.precision == "fp16" else 1.0
    losses = []
    for step in range(recipe.steps):
        sums = [torch.zeros_like(master) for master in masters.parameters()]
        of_step = []
        for ids in batches(recipe.steps * recipe.accumulation)[step * recipe.accumulation :][: recipe.accumulation]:
            loss = model(ids.to(device))
            of_step.append(loss.detach())
            (loss * (scale / recipe.accumulation)).backward()
            for total, param in zip(sums, model.parameters(), strict=True):
                total += param.grad.float() / scale  # type: ignore[union-attr]
                param.grad = None
        for master, total in zip(masters.parameters(), sums, strict=True):
            master.grad = total
        if recipe.clipping:
            nn.utils.clip_grad_norm_(masters.parameters(), recipe.clipping)
        adam.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                param.copy_(master)
        losses.append(torch.stack(of_step).mean().item())
    return losses


@contextmanager
def same_bits_each_time() -> Iterator[None]:
    """Use deterministic kernels in this context, so that every difference is an error."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch_threads(1):  # the models are small: on a busy machine, torch's threads would wait for each other
            yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]
