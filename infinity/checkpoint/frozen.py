"""Frozen parameters on their way into a checkpoint, while training goes on: nobody changes them, so any moment will do.

A thread reads them where they lie (`UnitParams.frozen_reader`), past what the step brings and evicts, into one block of
memory. What has no such way (values on a device) is written at the end, as a save that waits writes it.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from threading import Event

import torch

from infinity.checkpoint.blocks import Staging, submit
from infinity.checkpoint.shards import Shard, WrittenPart, trained_numel, units_to_write
from infinity.errors import CheckpointError
from infinity.memory import ALIGN_BYTES
from infinity.tiers import FrozenReader
from infinity.zero.build import Runtime

_READ_BYTES = 4 << 20
_POLL_S = 1.0
_LABEL = "-frozen"  # in the names of files


class FrozenShards:
    """This rank's shards of what is frozen; they are being written from when this is made.

    Args:
        directory: for the files.
    """

    def __init__(self, directory: Path, runtime: Runtime) -> None:
        self._directory = directory
        self._runtime = runtime
        self._given_up = Event()
        self._apart: list[tuple[Shard, FrozenReader]] = []
        self._with_others: list[Shard] = []
        for unit in units_to_write(runtime):
            shard = Shard(unit, runtime, (False,), _LABEL)
            row = runtime.row(unit)
            row.views.check()  # values that `param.data = values` has set are in memory before the thread reads it
            read = None if shard.is_empty else row.params.frozen_reader()
            if read is not None:
                self._apart.append((shard, read))
            elif not shard.is_empty:
                self._with_others.append(shard)
        self._thread = ThreadPoolExecutor(1, "infinity-checkpoint-frozen")
        self._written: Future[list[WrittenPart]] = submit(self._thread, self._write)

    @property
    def are_written(self) -> bool:
        """All that can be written without waiting is; or it will not be."""
        return self._written.done()

    def finish(self) -> list[WrittenPart]:
        """Wait for what is being written, and write the rest; all is on the drive when this returns."""
        while not self._written.done():
            wait([self._written], _POLL_S)
            self._runtime.ranks.progress()
        written = list(self._written.result())
        with Staging() as staging:
            for shard in self._with_others:
                written += shard.write(self._directory, staging)
        return written

    def close(self) -> None:
        """Give up what is not written; once is enough."""
        self._given_up.set()
        self._thread.shutdown()

    def _write(self) -> list[WrittenPart]:
        written: list[WrittenPart] = []
        into = torch.empty(_READ_BYTES + 3 * ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        with Staging() as staging:
            for shard, read in self._apart:
                written += self._write_shard(shard, read, staging, into)
        return written

    def _write_shard(self, shard: Shard, read: FrozenReader, staging: Staging, into: torch.Tensor) -> list[WrittenPart]:
        spec = self._runtime.row(shard.unit).params.spec
        most = _READ_BYTES // spec.dtype.itemsize
        shard.open(self._directory, staging)
        with closing(shard):
            for start in range(trained_numel(shard.unit, self._runtime), spec.shard_numel, most):
                if self._given_up.is_set():
                    raise CheckpointError("the save was cancelled")
                shard.append(start, read(start, min(most, spec.shard_numel - start), into), {})
            return shard.finish()
