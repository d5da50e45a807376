"""Shards as they were at one moment, written while training goes on.

[Note: written before it changes]
A tile of optimizer states and its parameters change in one place, the update. So its worker writes a tile before it
updates it for the first time: the values of that moment are in memory then anyway, nothing is read or copied for the
checkpoint, and no more memory is taken than a save that waits takes. What no update has come to is written by `finish`.
Whoever else changes values (see `Session`) finishes the save first. Between steps parameters that are in memory may
be written past the engine; their bytes are summed up at the beginning, and compared when they are written.
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
    """One unit's trained parameters.

    Attributes:
        stop: elements of the shard that are written, from the first on.
        flushed: what was written, when it is on the drive.
    """

    def __init__(self, unit: UnitLayout, runtime: Runtime) -> None:
        self.shard = Shard(unit, runtime, (True,))
        self.numel = trained_numel(unit, runtime)
        self.stop = 0
        self.flushed: Future[list[WrittenPart]] | None = None


class Snapshot:
    """This rank's shards at the moment when it is made; no update may be pending then.

    Args:
        directory: for the files.
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
        """Frozen parameters are being written still."""
        return self._frozen is not None and not self._frozen.are_written

    @property
    def is_complete(self) -> bool:
        """Every tile is written, or on its way; or nothing will be, since writing has failed."""
        with self._lock:
            return self._failure is not None or all(one.flushed is not None for one in self._units.values())

    def finish(self) -> list[WrittenPart]:
        """Write what is left; all is on the drive when this returns.

        No update may be pending, unless it is complete.

        Raises:
            OSError: writing failed, now or before.
            CheckpointError: parameters were written past the engine before their update.
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
        """Give up what is not finished, and the memory; once is enough."""
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
        """Write a tile, unless it is there; in the worker's thread, which has nothing to do with what fails."""
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
            except BaseException as error:  # the update goes on; whoever asks for the checkpoint gets it
                self._failure = error

    # Parameters that the training loop may write to #

    def _sums_of_reachable(self) -> dict[tuple[int, int], int]:
        """Sum of every tile's parameters, by unit and first element, where the model may have them between steps."""
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
