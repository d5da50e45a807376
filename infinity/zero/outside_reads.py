"""Parameters that a loss reads after the model's forward pass, found before the loss's backward.

Outside of a pass, a parameter reads as NaN while its unit is not in memory. Torch's functions, and an
`autograd.Function` of the user, compute a loss from this NaN without an error. Users would then look for the cause in
the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MAX_NODES = 10_000  # limits the search if a part of the model ran after `position`; a loss has fewer nodes


@dataclass(frozen=True)
class GraphPosition:
    """A moment in one thread's construction of the autograd graph.

    Attributes:
        thread: identifier of the thread.
        node: number of the next node: autograd numbers the nodes of a thread in the order of their creation.
    """

    thread: int
    node: int

    @staticmethod
    def now() -> GraphPosition:
        return GraphPosition(threading.get_ident(), torch._C._autograd._get_sequence_nr())


def leaves_read_since(loss: torch.Tensor, position: GraphPosition) -> Iterator[torch.Tensor]:
    """Yield the leaves that the loss's graph reads through nodes created after `position`, and that need a gradient.

    Yield nothing if another thread created the loss, because each thread numbers its own nodes.
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
