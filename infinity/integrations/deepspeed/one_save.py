"""Save a model whose values only rank 0 has collected."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from torch import nn

_NAME = "save_pretrained"


class SaveOfRank0:
    """The model's `save_pretrained` on a rank that was given no values, until the next training forward.

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
        """Pickle the method of the model's class instead, for copies of the model."""
        model: Any = self._model()
        return partial, (getattr(type(model), _NAME), model)


def expect_save_of_rank_0(model: nn.Module) -> None:
    """Replace the model's `save_pretrained` by a `SaveOfRank0`, if the model has this method."""
    if hasattr(model, _NAME):
        vars(model).setdefault(_NAME, SaveOfRank0(model))


def expect_any_save(model: nn.Module) -> None:
    """Undo `expect_save_of_rank_0`."""
    if isinstance(vars(model).get(_NAME), SaveOfRank0):
        del vars(model)[_NAME]
