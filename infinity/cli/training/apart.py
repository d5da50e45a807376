"""Documents of one sample must not see each other. That is the model's to do, so it is asked whether it does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError

_LENGTH = 8  # of each of two documents
_ALIKE = 0.02  # of the largest logit: more than rounding, in 16 bits, and less than what a pretrained model makes of it


def model_inputs(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | bool]:
    """What the model is called with; with a cache, transformers would not keep packed documents apart."""
    return {**batch, "use_cache": False} if "position_ids" in batch else dict(batch)


def check_apart(engine: Engine) -> None:
    """Have the model look at two samples whose second documents are the same, and whose first are not.

    All ranks call it together.

    Raises:
        ConfigError: the second documents do not come out the same.
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
    """Why .jsonl files are none for this model."""
    return (
        f"records are packed, several documents to a sample, but {type(model).__name__} does not keep them apart "
        "by position_ids (in this version of transformers, or at all): give plain text files"
    )
