"""The update of one unit in the optimizer pipeline, and its progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from infinity.kernels import Rule
from infinity.optim.undo_log import Image, Remainder
from infinity.telemetry import Times
from infinity.tiers.copies import Move, Transfer
from infinity.tiers.states import Tile

WriteParams = Callable[[int, int], "Transfer | None"]  # (start, numel): starts writing them home


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a shard with the same rule, which one kernel call may update."""

    start: int
    stop: int
    rule: Rule


@dataclass(eq=False)
class UpdateTicket:
    """One unit's update, and its progress.

    Attributes:
        unit: index of the unit.
        param: the shard's trainable elements in compute dtype, in host memory; updated in place.
        grad: gradients, same length.
        segments: elements to update, with their rules; other elements do not change.
        inputs: moves that bring `param` and `grad`, or still read them: the update waits for them, then drops them.
        write: starts writing the updated parameters of a tile home; None if they stay in memory.
        seed: seed of this update's stochastic rounding.
        first: position of the shard's first element in the unit, so that shards of several ranks round differently.
        next_use: position of the unit's next use. Among updates that no thread waits for, the lowest goes first.
        only: indices of the tiles to update; None for all.
        before: images of the undo log, by index of the tile.
        reconstructs_grads: whether a rollback shall reconstruct the gradients instead of keeping them, see
            [Note: lost gradients] in csrc/adam/reconstruction.h.
        reconstructs_param: the same for the parameters.
        tiles: tiles that are not updated yet, in order.
        awaited: whether a thread waits for this update.
        chosen: whether the worker has chosen it, and may be updating a tile of it.
        begun: whether a tile has been updated.
        keeps: whether the old values may still be needed.
        kept: tiles whose old values are in `before`.
        under_way: the tile that is being updated, if `before` has an image for it.
        reached: all elements before this one have been updated.
        computed: completes when the new values are in memory; `writes` may still be in flight.
        drops_grads: whether the gradients are dropped after the update, because the old states, the new states and
            `remainder` can reconstruct them; set by the submission. False from the moment that this is not true for all
            of them.
    """

    unit: int
    # Not in `repr`, because a traceback may be formatted after the memory is freed.
    param: torch.Tensor = field(repr=False)
    grad: torch.Tensor = field(repr=False)
    segments: tuple[Segment, ...]
    inputs: tuple[Move, ...]
    write: WriteParams | None
    seed: int = 0
    first: int = 0
    next_use: int = 0
    only: frozenset[int] | None = None
    before: Mapping[int, Image] = field(default_factory=dict)
    reconstructs_grads: bool = False
    reconstructs_param: bool = False
    tiles: deque[Tile] = field(init=False, default_factory=deque)
    awaited: bool = field(init=False, default=False)
    chosen: bool = field(init=False, default=False)
    begun: bool = field(init=False, default=False)
    keeps: bool = field(init=False, default=True)
    kept: list[Tile] = field(init=False, default_factory=list)
    under_way: Tile | None = field(init=False, default=None)
    reached: int = field(init=False, default=0)
    computed: Future[None] = field(init=False, default_factory=Future)
    writes: list[Transfer] = field(init=False, default_factory=list)
    drops_grads: bool = field(init=False, default=False)
    remainder: Remainder = field(init=False, default_factory=Remainder)

    def has_inputs(self) -> bool:
        """Whether the parameters and gradients have arrived."""
        return not self.inputs or all(move.transfer.done() for move in self.inputs)

    def done(self) -> bool:
        return self.computed.done() and (not self.writes or all(write.done() for write in self.writes))

    def times(self) -> Times | None:
        return None

    def result(self) -> None:
        """Block until the update is computed and written. Raises StorageError if one of its reads or writes failed."""
        self.computed.result()
        for write in self.writes:
            write.result()


def parts_of(ticket: UpdateTicket, tile: Tile) -> Iterator[tuple[int, int, Rule]]:
    """Yield (start, stop, rule) of each part of a tile that the ticket updates. Positions are those in the shard."""
    for segment in ticket.segments:
        start, stop = max(segment.start, tile.start), min(segment.stop, tile.start + tile.numel)
        if start < stop:
            yield start, stop, segment.rule
