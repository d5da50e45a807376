"""What DeepSpeed trained for the checkpoints in `data/deepspeed`, and what goes on from them.

`benchmarks/peers/deepspeed_checkpoints.py` trains it with DeepSpeed and writes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCAB, WIDTH, BATCH, LENGTH = 13, 6, 4, 8
BEFORE, AFTER = 4, 4  # steps before the checkpoint, and after it


class Block(nn.Module):
    """Odd sizes, so that every kind of padding is there."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.frozen = nn.Linear(WIDTH, 5, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden))) + self.frozen(hidden).mean(-1, keepdim=True)


class Small(nn.Module):
    """Tied embeddings, blocks with a frozen part, a norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.tensor([1.5, 0.5]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) * self.temperature[0]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() == 1], "weight_decay": 0.0},
    ]


def data(steps: int) -> list[torch.Tensor]:
    """A global batch for each step, of which rank r of n has the r-th part."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, VOCAB, (steps, BATCH, 1), generator=generator)
    return list((starts + torch.arange(LENGTH)) % VOCAB)


def config(stage: int, precision: str, ranks: int = 1) -> dict[str, Any]:
    """For either library."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 8, "loss_scale_window": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10, "sub_group_size": 100},
    }
