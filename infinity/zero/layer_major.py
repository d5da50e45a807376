"""Run all micro-batches of a step through a block before the next block is fetched, in forward and in backward.

[Note: layer-major micro-batches]
The forward of each micro-batch runs in a coroutine that pauses at the entry of each block. In a round, all
micro-batches that wait for the same block go through it, in order. When a coroutine reaches its loss, the backward of
its last piece runs at once, so that only one micro-batch's logits are in memory at a time.

At a block's entry the autograd graph is cut (see [Note: what a cut holds]): the block gets aliases of its inputs. So a
micro-batch's graph is in pieces, one a round, and backward runs them round by round, last round first: from an alias's
gradient it continues in the piece before. A tensor that reaches a later piece without going through a block's entry
would join their graphs; such a model is refused.

[Note: random numbers of a coroutine]
Each coroutine has its own stream of random numbers, which starts with a seed from the global generator and continues
after each pause where it stopped. So an activation checkpoint, which records the state before its block and sets it
again to recompute, gets the state that the block had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.tiers import carried_stream
from infinity.zero.coroutines import Coroutine, abandon, this_thread
from infinity.zero.cuts import Cuts
from infinity.zero.hooks import watch_blocks
from infinity.zero.partition import Partition
from infinity.zero.rounds import Rounds
from infinity.zero.unit import Unit

Forward = Callable[[], torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and keyword arguments
_CPU = torch.device("cpu")
INSTEAD = 'set tiering.accumulation to "micro_batch"'


class LayerMajor:
    """Run micro-batches together through the blocks of a model.

    Args:
        partition: units of a model that is a sequence of blocks.
        device: the compute device.

    Attributes:
        checked: paths through the blocks whose graph could be cut.
    """

    def __init__(self, model: nn.Module, partition: Partition, device: torch.device) -> None:
        self.blocks = partition.blocks
        self.device = device
        self.checked: set[tuple[int, ...]] = set()
        self._pass: LayerMajorPass | None = None
        self._handles = watch_blocks(model, partition, self._entry)

    def run(self, micro_batches: LayerMajorPass) -> list[torch.Tensor]:
        """Run forward and backward of all micro-batches of a step. Return the losses, detached.

        Raises:
            InfinityError: the model's graph cannot be cut at the entry of its blocks.
            BaseException: raised by the forward or backward of a micro-batch; no forward runs any more.
        """
        self._pass = micro_batches
        try:
            return micro_batches.run()
        finally:
            self._pass = None

    def entered(self, units: Sequence[Unit]) -> None:
        """Record the first use of the units in this pass."""
        if self._pass is not None and this_thread.coroutine is not None:
            self._pass.uses(units)

    def _entry(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if self._pass is None or this_thread.coroutine is None:  # evaluation, or a recomputation inside backward
            return args, kwargs
        return self._pass.enter(block, args, kwargs)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class MicroBatch(Coroutine[torch.Tensor]):
    """The forward of one micro-batch, which pauses at the entry of each block.

    Attributes:
        path: the blocks that it has entered.
        cuts: the cuts of its graph, at the entries of blocks.
    """

    def __init__(self, index: int, forward: Forward, generators: _Generators, seed: int) -> None:
        super().__init__(forward)
        self.index = index
        self.path: list[int] = []
        self.cuts = Cuts()
        self._generators = generators
        self._random = generators.seeded(seed)

    def resume(self) -> None:
        """Run to the entry of the next block, or to the loss, see [Note: random numbers of a coroutine]."""
        outside = self._generators.states()
        self._generators.restore(self._random)
        try:
            super().resume()
        finally:
            self._random = self._generators.states()
            self._generators.restore(outside)
        if self.ended:
            self.cuts.complete()


class LayerMajorPass(Rounds[MicroBatch, Unit]):
    """The forward and backward passes of one step's micro-batches. A subclass runs them.

    Args:
        forwards: each runs the model on a micro-batch and returns the loss, a scalar.
    """

    def __init__(self, layer_major: LayerMajor, forwards: Sequence[Forward]) -> None:
        super().__init__()
        self._blocks = layer_major.blocks
        self._checked = layer_major.checked
        self._losses = [torch.empty(0, dtype=torch.float32)] * len(forwards)
        seeds = torch.randint(2**62, (len(forwards),), device="cpu").tolist()
        generators = _Generators(layer_major.device)
        self._micro_batches = [
            MicroBatch(index, _with_thread_state(forward, layer_major.device), generators, seed)
            for index, (forward, seed) in enumerate(zip(forwards, seeds, strict=True))
        ]

    def run(self) -> list[torch.Tensor]:
        try:
            self.go(self._micro_batches)
        finally:
            abandon(self._micro_batches)  # the forwards that an exception has left waiting
        return self._losses

    def enter(self, block: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Pause a coroutine at a block until the block's turn, then cut the graph."""
        micro_batch = this_thread.coroutine
        assert isinstance(micro_batch, MicroBatch)
        if not torch.is_grad_enabled():
            raise InfinityError(
                f"block `{self._blocks[block]}` is called without gradients in a training step, so layer-major "
                "micro-batches cannot cut the graph there: checkpoint activations with use_reentrant=False, or "
                + INSTEAD
            )
        micro_batch.pause(block)
        micro_batch.path.append(block)
        return micro_batch.cuts.cut(self.running, args), micro_batch.cuts.cut(self.running, kwargs)

    def _take_loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the loss of a micro-batch whose forward is over."""
        loss = micro_batch.take_result()
        path = tuple(micro_batch.path)
        if path not in self._checked:
            self._check(micro_batch, loss)
            self._checked.add(path)
        self._losses[micro_batch.index] = loss.detach()
        return loss

    def _check(self, micro_batch: MicroBatch, loss: torch.Tensor) -> None:
        """Check that the pieces of the graph are separate.

        Raises:
            InfinityError: they are not.
        """
        joined = micro_batch.cuts.joined(loss)
        if joined is not None:
            round_index, node = joined
            raise InfinityError(
                f"a tensor goes past the entry of block `{self._blocks[self.block_of[round_index]]}` to a later part "
                f"of the model (autograd node {node.name()}): layer-major micro-batches are only for models in which "
                f"all tensors that need a gradient go through the blocks' inputs; {INSTEAD}"
            )


class _Generators:
    """The global random number generators of the host and the device."""

    def __init__(self, device: torch.device) -> None:
        self._kinds: list[Any] = [torch.random]  # modules that have them
        if device.type != "cpu":
            self._kinds.append(torch.get_device_module(device))

    def states(self) -> list[torch.Tensor]:
        return [kind.get_rng_state() for kind in self._kinds]

    def restore(self, states: list[torch.Tensor]) -> None:
        for kind, state in zip(self._kinds, states, strict=True):
            kind.set_rng_state(state)

    def seeded(self, seed: int) -> list[torch.Tensor]:
        outside = self.states()
        torch.manual_seed(seed)
        states = self.states()
        self.restore(outside)
        return states


def _with_thread_state(forward: Forward, device: torch.device) -> Forward:
    """Return the function for another thread: it runs with the thread-local state of torch that this thread has now."""
    kinds = {"cpu", device.type}
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    on_stream, default_device = carried_stream(device), torch.get_default_device()

    def run() -> torch.Tensor:
        with ExitStack() as stack:
            if default_device != _CPU:  # its context slows down every torch function
                stack.enter_context(default_device)
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            stack.enter_context(on_stream())
            return forward()

    return run
