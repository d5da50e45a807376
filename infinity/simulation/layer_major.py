"""Runs layer-major micro-batches: each use of the pass is a block, in the order of the engine's own rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from infinity.simulation.model import Pass
from infinity.zero.rounds import Rounds

if TYPE_CHECKING:
    from infinity.simulation.rank import Rank


class MicroBatch:
    """One micro-batch: `at` is its next block, `left` are those after it, `entered` those before it, by round."""

    def __init__(self, index: int, positions: Iterable[int]) -> None:
        self.index = index
        self.at: int | None = None
        self.ended = False
        self.left = deque(positions)
        self.entered: dict[int, int] = {}

    def pause(self) -> None:
        self.at = self.left.popleft() if self.left else None
        self.ended = self.at is None


class LayerMajorPass(Rounds[MicroBatch, int]):
    """Runs the micro-batches of `call` through a rank."""

    def __init__(self, rank: Rank, call: Pass) -> None:
        super().__init__()
        self._rank = rank
        self._call = call
        self._opened = False

    def run(self) -> None:
        count = len(self._call.uses)
        micro_batches = enumerate(self._call.micro_batches)
        self.go([MicroBatch(index, (at for at in each if at < count)) for index, each in micro_batches])

    def _forward(self, micro_batch: MicroBatch) -> None:
        if micro_batch.at is not None:
            micro_batch.entered[self.running] = micro_batch.at
            self.uses(self._call.uses[micro_batch.at])
            self._rank.activations.take_turn(self.running, micro_batch.index)
            self._rank.forward_use(self._call, micro_batch.at, micro_batch.index)
        micro_batch.pause()

    def _start(self, micro_batch: MicroBatch) -> None:
        if not self._opened:
            self._rank.open_backward()
            self._opened = True
        self._backward(micro_batch, max(micro_batch.entered, default=None))
        # The store predicts the order of uses by rounds, which is exact only if all micro-batches use the same blocks.
        if len(set(self._call.micro_batches)) == 1:
            self._rank.activations.begin_uses()

    def _go_on(self, micro_batch: MicroBatch, round_index: int) -> None:
        if round_index in micro_batch.entered:
            self._backward(micro_batch, max((at for at in micro_batch.entered if at < round_index), default=None))

    def _backward(self, micro_batch: MicroBatch, round_index: int | None) -> None:
        if round_index is not None:
            self._rank.backward_use(self._call, micro_batch.entered[round_index], None, micro_batch.index)

    def _complete(self, units: Sequence[int]) -> None:
        self._rank.complete(sorted(units, reverse=True))
