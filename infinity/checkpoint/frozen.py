"""Write frozen parameters into a checkpoint while training continues. They never change, so the time does not matter.

A thread reads them from their tier (`UnitParams.frozen_reader`) into one buffer, without the fetches and evictions of
the step. Parameters that cannot be read in this way (on a device) are written in `finish`, as in a blocking save.
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
    """This rank's shards of frozen parameters. The constructor starts to write them.

    Args:
        directory: the directory for the files.
    """

    def __init__(self, directory: Path, runtime: Runtime) -> None:
        self._directory = directory
        self._runtime = runtime
        self._cancelled = Event()
        self._by_thread: list[tuple[Shard, FrozenReader]] = []
        self._at_finish: list[Shard] = []
        for unit in units_to_write(runtime):
            shard = Shard(unit, runtime, (False,), _LABEL)
            row = runtime.row(unit)
            row.views.check()  # copies values of `param.data = values` to the tier before the thread reads it
            read = None if shard.is_empty else row.params.frozen_reader()
            if read is not None:
                self._by_thread.append((shard, read))
            elif not shard.is_empty:
                self._at_finish.append(shard)
        self._thread = ThreadPoolExecutor(1, "infinity-checkpoint-frozen")
        self._written: Future[list[WrittenPart]] = submit(self._thread, self._write)

    @property
    def are_written(self) -> bool:
        """Whether the thread has written its shards, or has failed."""
        return self._written.done()

    def finish(self) -> list[WrittenPart]:
        """Wait for the thread, write the other shards, and return when all are on the drive."""
        while not self._written.done():
            wait([self._written], _POLL_S)
            self._runtime.ranks.progress()
        written = list(self._written.result())
        with Staging() as staging:
            for shard in self._at_finish:
                written += shard.write(self._directory, staging)
        return written

    def close(self) -> None:
        """Cancel the rest of the writes. A second call does nothing."""
        self._cancelled.set()
        self._thread.shutdown()

    def _write(self) -> list[WrittenPart]:
        written: list[WrittenPart] = []
        into = torch.empty(_READ_BYTES + 3 * ALIGN_BYTES, dtype=torch.uint8, device="cpu")
        with Staging() as staging:
            for shard, read in self._by_thread:
                written += self._write_shard(shard, read, staging, into)
        return written

    def _write_shard(self, shard: Shard, read: FrozenReader, staging: Staging, into: torch.Tensor) -> list[WrittenPart]:
        spec = self._runtime.row(shard.unit).params.spec
        most = _READ_BYTES // spec.dtype.itemsize
        shard.open(self._directory, staging)
        with closing(shard):
            for start in range(trained_numel(shard.unit, self._runtime), spec.shard_numel, most):
                if self._cancelled.is_set():
                    raise CheckpointError("the save was cancelled")
                shard.append(start, read(start, min(most, spec.shard_numel - start), into), {})
            return shard.finish()
