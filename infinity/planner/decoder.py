"""A decoder of a given size, for plans of models of which only the number of parameters is known.

The blocks are GPT's: attention and a four times wider perceptron, so that one of width h has 12 h^2 parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from infinity.zero.tiling import TiledLinear

VOCABULARY = 50257
_HEAD_WIDTH = 64
WIDTH_STEP = 64
_MOST_PARAMS = 1e17
_WIDTH_PER_LAYER = 100  # GPT-3 has 12288 / 96 = 128, GPT-2 XL 33, ZeRO-Infinity's trillion 25600 / 128 = 200


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions; the embedding is also the head."""

    layers: int
    width: int
    vocabulary: int = VOCABULARY

    @property
    def params(self) -> int:
        return self.vocabulary * self.width + self.layers * (12 * self.width**2 + 13 * self.width) + 2 * self.width


def shape_of(params: float) -> Shape:
    """Return a decoder of usual proportions with about so many parameters, within one percent if possible.

    Raises:
        ValueError: fewer parameters than the smallest decoder has.
    """
    if not 0 < params < _MOST_PARAMS:
        raise ValueError(f"{params:g} is no number of parameters")
    widest = max(WIDTH_STEP, round(2 * (params * _WIDTH_PER_LAYER / 12) ** (1 / 3)))
    shapes = [_deep(params, width) for width in range(WIDTH_STEP, widest + 1, WIDTH_STEP)]

    def fitness(shape: Shape) -> tuple[int, float]:
        error = abs(shape.params / params - 1)
        return math.floor(100 * error), abs(math.log(shape.width / shape.layers / _WIDTH_PER_LAYER))

    best = min(shapes, key=fitness)
    if best.params > 1.5 * params:
        raise ValueError(f"the smallest decoder has {Shape(1, WIDTH_STEP).params:,} parameters")
    return best


def usual_shape(step: int) -> Shape:
    """Return the decoder of usual proportions that comes at this place, from 0, in their order by size.

    No dimension of a decoder is smaller than those of the one before it, and so is no memory that it takes. Those of
    `shape_of` are not in such an order: they are wide or deep as their number of parameters requires.
    """
    width = WIDTH_STEP * (1 + step // 2)
    return Shape(max(1, round((width + step % 2 * WIDTH_STEP) / _WIDTH_PER_LAYER)), width)


def _deep(params: float, width: int) -> Shape:
    """Return the decoder of this width whose number of layers fits best."""
    layers = (params - VOCABULARY * width) / (12 * width**2 + 13 * width)
    return Shape(max(1, round(layers)), width)


def _linear(inputs: int, outputs: int, tiles: int) -> nn.Module:
    return nn.Linear(inputs, outputs) if tiles == 1 else TiledLinear(inputs, outputs, out_splits=tiles)


class Block(nn.Module):
    def __init__(self, width: int, tiles: int) -> None:
        super().__init__()
        self.heads = math.ceil(width / _HEAD_WIDTH)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _linear(width, 3 * width, tiles), _linear(width, width, tiles)
        self.up, self.down = _linear(width, 4 * width, tiles), _linear(4 * width, width, tiles)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        inner: torch.Tensor = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return x + inner


class Decoder(nn.Module):
    """A language model: `forward(input_ids, labels)` returns its loss."""

    _no_split_modules = (Block.__name__,)

    def __init__(self, shape: Shape, tiles: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, tiles) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def decoder_of(shape: Shape, tiles: int = 1) -> Decoder:
    """Return a decoder of this shape on meta. Each of its linear layers is cut into so many tiles."""
    with torch.device("meta"):
        return Decoder(shape, tiles)
