"""The order in which layer-major micro-batches run: round by round, one block a round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Paused(Protocol):
    """A micro-batch whose forward pauses at the entry of each block.

    Attributes:
        at: the block at whose entry it waits; None before its start and after its end.
        ended: whether its forward pass has reached the loss.
    """

    at: int | None
    ended: bool


PausedT = TypeVar("PausedT", bound=Paused)
UnitT = TypeVar("UnitT")  # a unit, or its number


class Rounds(ABC, Generic[PausedT, UnitT]):
    """Run forward and backward of all micro-batches of a step, see [Note: layer-major micro-batches].

    Attributes:
        running: number of the running round; round 0 is the part before the first block.
        block_of: the block of each round.
    """

    def __init__(self) -> None:
        self.running = 0
        self.block_of: dict[int, int] = {}
        self._first_use: dict[UnitT, int] = {}  # the round of a unit's first use

    def uses(self, units: Sequence[UnitT]) -> None:
        """Record a use of the units in the running round of the forward pass."""
        for unit in units:
            self._first_use.setdefault(unit, self.running)

    def go(self, micro_batches: Sequence[PausedT]) -> None:
        """Run the forward and backward passes of all micro-batches."""
        waiting = going = micro_batches
        while waiting:
            for micro_batch in going:
                self._forward(micro_batch)
                if micro_batch.ended:
                    self._start(micro_batch)
            waiting = [each for each in waiting if not each.ended]
            block = min((each.at for each in waiting if each.at is not None), default=None)
            going = [each for each in waiting if each.at == block]
            if block is not None:
                self.running += 1
                self.block_of[self.running] = block
        self._complete_round(self.running)
        for round_index in range(self.running, 0, -1):
            for micro_batch in micro_batches:
                self._go_on(micro_batch, round_index)
            self._complete_round(round_index - 1)

    def _complete_round(self, round_index: int) -> None:
        self._complete([unit for unit, first in self._first_use.items() if first == round_index])

    @abstractmethod
    def _forward(self, micro_batch: PausedT) -> None:
        """Run to the entry of the next block, or to the loss."""

    @abstractmethod
    def _start(self, micro_batch: PausedT) -> None:
        """Run the backward of the last piece after a finished forward."""

    @abstractmethod
    def _go_on(self, micro_batch: PausedT, round_index: int) -> None:
        """If the micro-batch has entered a block in this round, run the backward of the piece before this block."""

    @abstractmethod
    def _complete(self, units: Sequence[UnitT]) -> None:
        """Called when backward has left all modules that used these units."""
