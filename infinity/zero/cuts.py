"""Cut an autograd graph into pieces, so that backward can run through one piece at a time.

[Note: what a cut holds]
At a cut, a tensor is replaced by an alias that begins a new graph. An ordinary leaf would also begin a graph, but
autograd keeps a leaf, and so its values, until backward. So the alias is the output of a function that saves no values
and only records the gradient. The graph before the cut is kept alive by a placeholder of one element. Neither keeps the
values alive: when the block has been computed, they are freed, or the hooks for saved tensors have stored them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(eq=False)
class _Gradient:
    """The gradient of a tensor that was cut: the sum of the parts that backward has computed so far."""

    sum: torch.Tensor | None = None


class Cuts:
    """The cuts in the graph of one forward pass. A tensor belongs to the round in which it was cut first."""

    def __init__(self) -> None:
        # the tensors from which backward of the piece before the cut begins, and their gradients
        self._by_round: defaultdict[int, list[tuple[torch.Tensor, _Gradient]]] = defaultdict(list)
        self._aliases = WeakTensorKeyDictionary()  # by the tensor that was cut
        self._anchor = torch.empty(0, dtype=torch.float32, requires_grad=True)

    def cut(self, round_index: int, value: Any) -> Any:
        """Return the value with aliases in the place of its tensors that need a gradient."""
        if isinstance(value, torch.Tensor):
            if not value.requires_grad:
                return value
            alias = self._aliases.get(value)
            if alias is None:
                gradient = _Gradient()
                alias = _begin(self._anchor, value.detach(), gradient)
                self._aliases[value] = alias
                self._by_round[round_index].append((_end(value), gradient))
            return alias
        if type(value) is dict:
            return {key: self.cut(round_index, item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.cut(round_index, item) for item in value)
        return value

    def complete(self) -> None:
        """End the forward pass. No tensor is cut after it."""
        self._aliases.clear()

    def take(self, round_index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors from which backward of the piece before this round begins, and their gradients.

        The cuts of this round are forgotten.
        """
        ends, grads = [], []
        for end, gradient in self._by_round.pop(round_index, ()):
            if gradient.sum is not None:
                ends.append(end)
                grads.append(gradient.sum)
        return ends, grads

    def joined(self, output: torch.Tensor) -> tuple[int, torch.autograd.graph.Node] | None:
        """Return the last round whose cuts do not separate the graph, and a node that both pieces contain.

        Return None if all pieces of the graph of `output` are separate.
        """
        seen = set(_graph([output]))
        for round_index in sorted(self._by_round, reverse=True):
            piece = set(_graph([end for end, _ in self._by_round[round_index]]))
            for node in piece & seen:
                if node.name() not in _ENDS:
                    return round_index, node
            seen |= piece
        return None


class _Begin(torch.autograd.Function):
    """The first node of a piece: an alias of the values. Its gradient is recorded, and not passed on."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return values.view_as(values)  # a view, so that torch refuses to change it in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        before = ctx.gradient.sum
        ctx.gradient.sum = grad if before is None else before + grad
        return None, None, None


class _End(torch.autograd.Function):
    """The last node of a piece: one element in the shape of the values, from which backward can begin."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.empty((), dtype=values.dtype, device=values.device).expand(values.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


_begin: Callable[[torch.Tensor, torch.Tensor, _Gradient], torch.Tensor] = _Begin.apply
_end: Callable[[torch.Tensor], torch.Tensor] = _End.apply
_ENDS = ("torch::autograd::AccumulateGrad", f"{_Begin.__name__}Backward")  # nodes that pieces may have in common


def _graph(tensors: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes that backward from these tensors runs."""
    stack = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            yield node
