"""Write the shards of one moment while training continues.

[Note: written before it changes]
A tile of optimizer states and its parameters change only in an update. So the optimizer's worker writes each tile
before its first update. The values are in memory then anyway: nothing is read or copied for the checkpoint, and no more
memory is needed than for a blocking save. `finish` writes the tiles that no update has reached. All other calls that
change values (see `Session`) finish the save first. Between steps the training loop may write to parameters that are in
memory, without a call of the engine. This is detected by checksums that are taken at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch

from infinity.checkpoint.blocks import Staging, submit
from infinity.checkpoint.frozen import FrozenShards
from infinity.checkpoint.shards import Shard, WrittenPart, trained_numel, units_to_write
from infinity.checkpoint.sums import crc32
from infinity.errors import CheckpointError
from infinity.schedule.unit_state import Residency
from infinity.tiers.states import Tile
from infinity.zero.build import Runtime
from infinity.zero.partition import UnitLayout


class _Unit:
    """The trained parameters of one unit.

    Attributes:
        stop: number of elements that are written, from the first one on.
        flushed: resolves to the written parts, when they are on the drive.
    """

    def __init__(self, unit: UnitLayout, runtime: Runtime) -> None:
        self.shard = Shard(unit, runtime, (True,))
        self.numel = trained_numel(unit, runtime)
        self.stop = 0
        self.flushed: Future[list[WrittenPart]] | None = None


class Snapshot:
    """This rank's shards at the moment of the constructor's call. No update may be pending then.

    Args:
        directory: the directory for the files.
        frozen: write frozen parameters, too; see frozen.py.
    """

    def __init__(self, directory: Path, runtime: Runtime, *, frozen: bool) -> None:
        self._directory = directory
        self._runtime = runtime
        self._failure: BaseException | None = None
        self._lock = Lock()
        self._units: dict[int, _Unit] = {}
        for unit in units_to_write(runtime):
            one = _Unit(unit, runtime)
            if not one.shard.is_empty:
                self._units[unit.index] = one
        self._sums = self._sums_of_reachable()
        self._staging = Staging()
        self._flusher = ThreadPoolExecutor(1, "infinity-checkpoint")
        self._frozen = FrozenShards(directory, runtime) if frozen else None
        runtime.pipeline.before_update = self._before_update

    @property
    def waits_for_frozen(self) -> bool:
        """Whether frozen parameters are still being written."""
        return self._frozen is not None and not self._frozen.are_written

    @property
    def is_complete(self) -> bool:
        """Whether every tile is written or being flushed, or writing has failed."""
        with self._lock:
            return self._failure is not None or all(one.flushed is not None for one in self._units.values())

    def finish(self) -> list[WrittenPart]:
        """Write the remaining tiles, and return when all are on the drive.

        No update may be pending, unless `is_complete` is True.

        Raises:
            OSError: writing failed, now or before.
            CheckpointError: the training loop wrote to parameters before they were saved.
        """
        written: list[WrittenPart] = []
        for one in self._units.values():
            if one.flushed is None and self._failure is None:
                for start, flat, fields in one.shard.slices():
                    self._write(one, start, flat, fields)
                    self._runtime.ranks.progress()
        self._runtime.pipeline.before_update = None
        if self._failure is not None:
            raise self._failure
        for one in self._units.values():
            assert one.flushed is not None
            written += one.flushed.result()
            self._runtime.ranks.progress()
        return written if self._frozen is None else written + self._frozen.finish()

    def close(self) -> None:
        """Cancel an unfinished save, and free the buffers. A second call does nothing."""
        if self._runtime.pipeline.before_update == self._before_update:
            self._runtime.pipeline.before_update = None
        with self._lock:
            self._failure = self._failure or CheckpointError("the save was cancelled")
            for one in self._units.values():
                if one.flushed is None:
                    one.shard.close()
        if self._frozen is not None:
            self._frozen.close()
        self._flusher.shutdown()
        self._staging.close()

    def _before_update(self, unit: int, tile: Tile, param: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Write a tile, unless it is written. Called in the optimizer's thread; an error does not stop the update."""
        one = self._units.get(unit)
        if one is not None:
            self._write(one, tile.start, param[tile.start : tile.start + tile.numel], fields)

    def _write(self, one: _Unit, start: int, flat: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            if self._failure is not None or start < one.stop:
                return
            try:
                self._check(one.shard.unit, start, flat)
                if not one.stop:
                    one.shard.open(self._directory, self._staging)
                one.shard.append(start, flat, fields)
                one.stop = start + flat.numel()
                if one.stop == one.numel:
                    one.flushed = submit(self._flusher, one.shard.finish)
            except BaseException as error:  # the update continues; `finish` raises the error
                self._failure = error

    # Parameters that the training loop may write to #

    def _sums_of_reachable(self) -> dict[tuple[int, int], int]:
        """Return checksums of tiles that the training loop can write to, by unit and first element."""
        sums = {}
        executor = self._runtime.executor
        for index in self._units:
            row = executor.units[index]
            if row.residency is Residency.RESIDENT:
                with executor.resident(row) as flat:
                    for tile in row.states.tiles:
                        sums[index, tile.start] = _sum(flat[tile.start : tile.start + tile.numel])
        return sums

    def _check(self, unit: UnitLayout, start: int, flat: torch.Tensor) -> None:
        before = self._sums.get((unit.index, start))
        if before is not None and before != _sum(flat):
            names = ", ".join(info.name for info in unit.params[:3])
            raise CheckpointError(
                f"parameters of unit `{unit.name}` ({names}...) were written by the training loop after "
                "save_checkpoint(blocking=False), before the save had read them: call engine.wait_checkpoint() "
                "before you change them"
            )


def _sum(flat: torch.Tensor) -> int:
    return crc32(flat.detach().contiguous().view(torch.uint8).numpy().data)
