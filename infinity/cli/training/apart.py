"""Checks that a model keeps the documents of a packed sample apart: no token may attend to another document."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError

_LENGTH = 8  # tokens of each of two documents
_ALIKE = 0.02  # allowed difference, as a share of the largest logit: above 16-bit rounding, below a real influence


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | bool]:
    """Return the arguments of the model. With a cache, transformers would not keep packed documents apart."""
    return {**batch, "use_cache": False} if "position_ids" in batch else dict(batch)


def check_apart(engine: Engine) -> None:
    """Run the model on two samples that differ only in their first document, and compare the logits of the second.

    All ranks must call it together.

    Raises:
        ConfigError: the logits of the second document differ.
    """
    first = torch.arange(_LENGTH)
    ids = torch.stack([torch.cat([first, first]), torch.cat([torch.zeros_like(first), first])])
    positions = torch.cat([first, first]).expand(2, -1)
    batch = {"input_ids": ids.to(engine.device), "position_ids": positions.to(engine.device)}
    trains = engine.module.training
    engine.eval()
    try:
        with torch.no_grad():
            logits = engine(**model_inputs(batch)).logits[:, _LENGTH:].float()
    finally:
        engine.train(trains)
    if not (logits[0] - logits[1]).abs().max() <= _ALIKE * logits.abs().max():
        raise ConfigError(apart_problem(engine.module))


def apart_problem(model: nn.Module) -> str:
    """Return why this model cannot be trained on packed records."""
    return (
        f"records are packed, several documents to a sample, but {type(model).__name__} does not keep them apart "
        "by position_ids (in this version of transformers, or at all): give plain text files"
    )
