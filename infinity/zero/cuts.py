"""Cuts an autograd graph into pieces, so that backward can go through them one at a time.

[Note: what a cut holds]
At a cut a tensor is replaced by an alias that begins a graph of its own. An ordinary leaf would do, but autograd holds
a leaf, and so its values, until backward. Therefore the alias is the output of a function that needs no values, and
only notes the gradient; and the graph before the cut is held by a stand-in of one element. The values belong to those
who compute with them: once the block is through they are freed, or are where the hooks for saved tensors put them.
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
    """The gradient of a tensor that was cut, as far as backward has come."""

    sum: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> None:
        self.sum = grad if self.sum is None else self.sum + grad


class Cuts:
    """Where the graph of one forward pass is cut: by round, what was cut in it for the first time."""

    def __init__(self) -> None:
        # where backward of the piece before begins, and with what
        self._by_round: defaultdict[int, list[tuple[torch.Tensor, _Gradient]]] = defaultdict(list)
        self._aliases = WeakTensorKeyDictionary()  # by what they stand for
        self._anchor = torch.empty(0, dtype=torch.float32, requires_grad=True)

    def cut(self, round_index: int, value: Any) -> Any:
        """The value with aliases in place of its tensors that need a gradient."""
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
        if isinstance(value, dict) and type(value) is dict:
            return {key: self.cut(round_index, item) for key, item in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self.cut(round_index, item) for item in value)
        return value

    def complete(self) -> None:
        """The forward pass is over: nothing is cut any more."""
        self._aliases.clear()

    def take(self, round_index: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where backward goes on before what was cut in this round, and the gradients there; their last use."""
        ends, grads = [], []
        for end, gradient in self._by_round.pop(round_index, ()):
            if gradient.sum is not None:
                ends.append(end)
                grads.append(gradient.sum)
        return ends, grads

    def joined(self, output: torch.Tensor) -> tuple[int, torch.autograd.graph.Node] | None:
        """The last round past whose cuts the graph of `output` goes, and a node there; None if all pieces are apart."""
        seen = set(_graph([output]))
        for round_index in sorted(self._by_round, reverse=True):
            piece = set(_graph([end for end, _ in self._by_round[round_index]]))
            for node in piece & seen:
                if node.name() not in _ENDS:
                    return round_index, node
            seen |= piece
        return None


class _Begin(torch.autograd.Function):
    """The first node of a piece: an alias of the values, whose gradient is noted and goes no further."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, values: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return values.view_as(values)  # a view, so that torch refuses to change it in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.gradient.add(grad)
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
    """The nodes that backward from these tensors goes through."""
    stack = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(following for following, _ in node.next_functions)
            yield node
