"""What stands in `param.grad` while the gradient is with the engine.

[Note: stand-ins]
Gradients leave the parameters as backward produces them. Code that looks at `param.grad` all the same, as
`clip_grad_norm_(model.parameters())` does, would find None, which torch reads as "no gradient", and do nothing without
a word. So until the step is over a parameter with a gradient has a tensor there that knows its shape and dtype, takes
no memory, and whose every use raises. And since `model.zero_grad()` and `param.grad = None` take it away, it also tells
that the user has dropped the gradient; whatever else stands there in its place was set by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.zero.model_parts import is_distributed
from infinity.zero.partition import Unit


class StandIn(torch.Tensor):
    """Has the form of a gradient and no values, see [Note: stand-ins]."""

    @staticmethod
    def __new__(cls, param: torch.Tensor) -> StandIn:
        made: StandIn = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise InfinityError(
            f"{func.__name__} of `param.grad`: gradients are with the engine, sharded and in their tier, and cannot be "
            "read or changed here. Clipping is configured (gradient_clipping), engine.get_global_grad_norm() has the "
            "norm, and optimizer.zero_grad() drops them"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StandIn(shape={tuple(self.shape)}, dtype={self.dtype})"


class StandIns:
    """The stand-ins of a model's trained parameters.

    Args:
        model: its parameters that tensor parallelism has divided have none.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit]) -> None:
        self._params: list[list[tuple[int, str, nn.Parameter]]] = []
        for unit in units:
            trained = [(i, slot.name, model.get_parameter(slot.name)) for i, slot in enumerate(unit.slots)]
            self._params.append([(i, n, p) for i, n, p in trained if unit.slots[i].trainable and not is_distributed(p)])
        self._made: dict[int, StandIn] = {}  # by identity of the parameter; kept, since making one takes longer
        self._having: dict[int, set[int]] = {}  # slots with a gradient, by unit
        self._placed = False

    @torch.inference_mode(False)
    def place(self, slots: Mapping[int, Collection[int]]) -> None:
        """These parameters, by unit, have a gradient, beside those that are known to have one."""
        for unit, some in slots.items():
            self._having.setdefault(unit, set()).update(some)
        for _, _, _, param in self._each():
            stand_in = self._made.get(id(param))
            if stand_in is None:
                stand_in = self._made[id(param)] = StandIn(param)
            param.grad = stand_in
        self._placed = True

    def lift(self) -> None:
        """Backward is about to write to `param.grad`; `place` follows."""
        for _, _, _, param in self._each():
            if isinstance(param.grad, StandIn):
                param.grad = None
        self._placed = False

    def clear(self) -> None:
        """No parameter has a gradient."""
        self.lift()
        self._having.clear()

    def wipe(self) -> None:
        """As `clear`, also of a gradient that a backward pass has left as it failed."""
        self.clear()
        for params in self._params:
            for _, _, param in params:
                param.grad = None

    def check(self, arriving: nn.Parameter | None = None) -> None:
        """Nothing else than stand-ins is where gradients are, but for what is just arriving.

        Raises:
            InfinityError: something is.
        """
        for params in self._params:
            for _, name, param in params:
                if param.grad is not None and not isinstance(param.grad, StandIn) and param is not arriving:
                    raise InfinityError(
                        f"the gradient of `{name}` was set by hand, which the engine does not see: leave param.grad "
                        "alone, and change the loss instead"
                    )

    def dropped(self) -> dict[int, set[int]]:
        """The slots, by unit, whose stand-in somebody has taken away."""
        gone: dict[int, set[int]] = {}
        if self._placed:
            for unit, slot, _, param in self._each():
                if param.grad is None:
                    gone.setdefault(unit, set()).add(slot)
        return gone

    def forget(self, slots: Mapping[int, Collection[int]]) -> None:
        """These parameters have no gradient any more."""
        for unit, some in slots.items():
            self._having[unit].difference_update(some)

    def _each(self) -> Iterator[tuple[int, int, str, nn.Parameter]]:
        for unit, slots in self._having.items():
            for slot, name, param in self._params[unit]:
                if slot in slots:
                    yield unit, slot, name, param
