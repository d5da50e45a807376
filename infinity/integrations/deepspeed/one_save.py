"""The save of a model whose values were given to rank 0 alone."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

_NAME = "save_pretrained"


class SaveOfRank0:
    """`model.save_pretrained` until the next training forward, on a rank that was given no values.

    Every rank calls `model.save_pretrained(..., state_dict=accelerator.get_state_dict(model))`, as accelerate documents
    it, and at stage 3 the state dict is None on other ranks than 0. transformers and PEFT would then collect the
    model's own values, which all ranks gather together, and rank 0 does not come. Such a call has nothing to write.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        if kwargs.get("state_dict", self) is None and not kwargs.get("is_main_process", True):
            return None
        expect_any_save(model)
        try:
            return model.save_pretrained(*args, **kwargs)
        finally:
            expect_save_of_rank_0(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> SaveOfRank0:
        return SaveOfRank0(memo[id(self._model())])

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of the model be pickled, whose `save_pretrained` is then that of its class."""
        model: Any = self._model()
        return partial, (getattr(type(model), _NAME), model)


def expect_save_of_rank_0(model: nn.Module) -> None:
    """Let calls of `model.save_pretrained` be those of `SaveOfRank0`, if the model has such a method."""
    if hasattr(model, _NAME):
        vars(model).setdefault(_NAME, SaveOfRank0(model))


def expect_any_save(model: nn.Module) -> None:
    """Undo `expect_save_of_rank_0`."""
    if isinstance(vars(model).get(_NAME), SaveOfRank0):
        del vars(model)[_NAME]
