"""Brings every rank's shards to rank 0, which writes the checkpoint, in memory bounded by one tile.

Ranks come one after the other, and a shard is a contiguous slice of its unit, so that each parameter's elements arrive
in their order. Before each unit, rank 0 says whether it still can write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from infinity.errors import CheckpointError, RankError
from infinity.zero.build import Runtime
from infinity.zero.partition import Unit


@dataclass(frozen=True)
class ShardSlice:
    """Elements `[start, stop)` of one rank's shard.

    Attributes:
        param: in compute dtype.
        fields: the optimizer's, by name; what is frozen has none.
    """

    rank: int
    start: int
    stop: int
    param: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    has_fields: bool = True


class Relay:
    """One save. Rank 0 visits `slices` of every unit in order within the context; the others `send_all`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ranks = runtime.ranks
        # States that every rank has whole are rank 0's to save.
        self._senders = range(1, runtime.partition.sharding.count)
        self._expected: deque[ShardSlice] = deque()  # of the unit that is being written

    def send_all(self) -> None:
        """Send what rank 0 asks for.

        Raises:
            CheckpointError: rank 0 could not write it.
        """
        for unit in self._runtime.partition.units:
            if self._ranks.any(False):
                raise CheckpointError("rank 0 could not write the checkpoint; its own message says why")
            if self._ranks.rank in self._senders:
                for slice_ in self._own(unit):
                    for tensor in (slice_.param, *slice_.fields.values()):
                        self._ranks.send(_as_bytes(tensor))
        if self._ranks.any(False):
            raise CheckpointError("rank 0 could not write the checkpoint; its own message says why")

    def slices(self, unit: Unit) -> Iterator[ShardSlice]:
        """All ranks' shards of a unit, slice by slice; valid until the next is asked for."""
        self._ranks.any(False)
        self._expected.extend(self._slices_of_others(unit))
        yield from self._own(unit)
        while self._expected:
            yield self._receive()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RankError):
            return  # nobody is left to tell
        while self._expected:  # writing has failed, but it is under way
            self._receive()
        self._ranks.any(error is not None)

    def _own(self, unit: Unit) -> Iterator[ShardSlice]:
        rank, stop = self._runtime.partition.sharding.rank, 0
        with self._runtime.executor.resident(unit.index) as flat:
            for tile, fields in self._runtime.pipeline.tiles(unit.index, writable=False):
                stop = tile.start + tile.numel
                yield ShardSlice(rank, tile.start, stop, flat[tile.start : stop], fields)
            if stop < flat.numel():
                yield ShardSlice(rank, stop, flat.numel(), flat[stop:], {}, has_fields=False)

    def _slices_of_others(self, unit: Unit) -> Iterator[ShardSlice]:
        """What the other ranks will send, which is cut as this rank's is; without memory yet."""
        spec = self._runtime.params.specs[unit.index]
        nothing = torch.empty(0, dtype=spec.dtype)
        for rank in self._senders:
            stop = 0
            for start, numel in self._runtime.pipeline.geometry(unit.index):
                stop = start + numel
                yield ShardSlice(rank, start, stop, nothing, {}, has_fields=True)
            if stop < spec.shard_numel:
                yield ShardSlice(rank, stop, spec.shard_numel, nothing, {}, has_fields=False)

    def _receive(self) -> ShardSlice:
        expected = self._expected.popleft()
        layout = self._runtime.layout
        numel = expected.stop - expected.start
        param = torch.empty(numel, dtype=expected.param.dtype)
        fields: Mapping[str, torch.Tensor] = {}
        if expected.has_fields:
            fields = layout.views(torch.empty(layout.tile_bytes(numel), dtype=torch.uint8), numel)
        for tensor in (param, *fields.values()):
            self._ranks.receive(_as_bytes(tensor), expected.rank)
        return replace(expected, param=param, fields=fields)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
