"""A script's default device is where it makes its own tensors; what a checkpoint passes through is in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity


def engine_of(seed: int, state_format: str) -> infinity.Engine:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "tiering": {"state_format": state_format},
    }
    return infinity.initialize(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config=config)[0]


@pytest.mark.parametrize("loaded_as", ["split", "int8"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_checkpoint_is_saved_and_loaded_whatever_the_default_device(blocking, loaded_as, tmp_path) -> None:
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    with engine_of(0, "split") as saving, engine_of(1, loaded_as) as loading:
        with torch.device("meta"):  # as "cuda", which is not everywhere
            saving.save_checkpoint(tmp_path, blocking=blocking)
            saving.wait_checkpoint()
            assert loading.load_checkpoint(tmp_path)[0] is not None
        assert torch.equal(saving(x), loading(x))
