"""Parameters that a loss reads after the model's forward pass, found before the loss's backward.

Between passes a parameter that comes and goes is NaN where its unit is away. Torch's functions, and an
`autograd.Function` of the user's, would compute a loss of that without a word, and the batch would be blamed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MAX_NODES = 10_000  # of a loss; a part of a model that was taken for one is not followed for ever


@dataclass(frozen=True)
class GraphPosition:
    """A moment in the graph that a thread makes: autograd numbers its nodes in the order in which they come.

    Attributes:
        node: number of the next one.
    """

    thread: int
    node: int

    @staticmethod
    def now() -> GraphPosition:
        return GraphPosition(threading.get_ident(), torch._C._autograd._get_sequence_nr())


def leaves_read_since(loss: torch.Tensor, position: GraphPosition) -> Iterator[torch.Tensor]:
    """The leaves that need a gradient and that nodes of the loss's graph read which were made since then.

    None if the loss was made by another thread, whose nodes have numbers of their own.
    """
    if loss.grad_fn is None or position.thread != threading.get_ident():
        return
    seen = {loss.grad_fn}
    left = [loss.grad_fn] if loss.grad_fn._sequence_nr() >= position.node else []
    while left and len(seen) < _MAX_NODES:
        for node, _ in left.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                yield leaf
            elif node._sequence_nr() >= position.node:
                left.append(node)
