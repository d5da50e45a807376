"""A micro-batch: what a model is called with, and the loss that comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity.errors import InfinityError

LossFn = Callable[[Any, Any], torch.Tensor]


def call(model: Callable[..., Any], batch: Any) -> Any:
    """A mapping is the keyword arguments, a tuple or list the positional ones, anything else the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(outputs: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """The loss of a micro-batch: by default the output itself, or its `loss`.

    Raises:
        InfinityError: there is none.
    """
    loss = getattr(outputs, "loss", outputs) if loss_fn is None else loss_fn(outputs, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = "the model's output" if loss_fn is None else "what loss_fn returns"
        raise InfinityError(
            f"train_batch needs a loss, one number that has a gradient, and {what} is none: give loss_fn"
        )
    return loss
