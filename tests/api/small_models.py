"""A model that trains in milliseconds, and the files of its checkpoints."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity

WIDTH = 64  # enough for every rank to have a part

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


class Heads(nn.Module):
    """Its parameters are the same for every number of heads."""

    def __init__(self, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x).view(len(x), self.heads, -1).softmax(-1).flatten(1))


def engine_of(model: nn.Module | None = None, seed: int = 0, **more: Any) -> infinity.Engine:
    if model is None:
        torch.manual_seed(seed)
        model = Heads()
    return infinity.initialize(model=model, config=CONFIG | more)[0]


def train(engine: infinity.Engine, steps: int = 1, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        engine.backward(engine(torch.randn(4, WIDTH, generator=generator)).square().mean())
        engine.step()


def weights(engine: infinity.Engine) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters())


def reseal(manifest: dict[str, Any], directory: Path) -> None:
    """Write a manifest whose checksum is right, as somebody who means harm would."""
    manifest.pop("crc", None)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    (directory / "manifest.json").write_text(json.dumps(manifest | {"crc": zlib.crc32(text.encode())}))


def flip(path: Path, position: int = -1) -> None:
    """Change a bit of this byte."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
