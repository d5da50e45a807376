"""torch's learning-rate schedulers on the engine's optimizer, given as objects or as factories."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from infinity.errors import ConfigError


def is_factory(given: Any) -> bool:
    """Whether `given` is a callable that returns a scheduler for an optimizer, and not a scheduler itself."""
    return isinstance(given, type) or (callable(given) and not hasattr(given, "step"))


def rebind(scheduler: Any, given: torch.optim.Optimizer | None, optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler, and the schedulers in it, change the groups of `optimizer` instead of `given`.

    Raises:
        ConfigError: the scheduler belongs to another optimizer.
    """
    parts = list(_parts(scheduler, {}))
    for part in parts:
        own = getattr(part, "optimizer", None)
        if isinstance(own, torch.optim.Optimizer) and own is not optimizer and own is not given:
            raise ConfigError(
                f"lr_scheduler has a {type(part).__name__} of an optimizer ({type(own).__name__}) that was not given "
                "to initialize: pass it as `optimizer`, too, or pass a callable that makes the scheduler"
            )
    for part in parts:
        for name, value in list(vars(part).items()):
            if value is given and given is not None:
                setattr(part, name, optimizer)


def advances_by_itself(scheduler: Any) -> bool:
    """Whether `step()` needs no argument from the training loop, as torch's ReduceLROnPlateau needs a metric."""
    if isinstance(scheduler, ReduceLROnPlateau):  # a subclass may give the metric a default, for other callers
        return False
    try:
        signature(scheduler.step).bind()
    except TypeError:
        return False
    except ValueError:  # a built-in without a signature
        pass
    return True


def _parts(scheduler: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield the scheduler and all schedulers in its attributes, also in lists or tuples."""
    if id(scheduler) in seen or not hasattr(scheduler, "__dict__"):
        return
    seen[id(scheduler)] = scheduler
    yield scheduler
    for value in list(vars(scheduler).values()):
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if hasattr(each, "optimizer") and hasattr(each, "step"):
                yield from _parts(each, seen)
