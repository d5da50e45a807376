"""Write one rank's shards of a checkpoint, one file for each unit, in memory bounded by a tile."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.format import FROZEN_FIELD, MASTER_FIELD, stored_fields, stored_shape
from infinity.checkpoint.stored import StoredTensor
from infinity.checkpoint.tensors import DTYPE_NAMES, TensorFile, TensorPart
from infinity.optim.formats import read_master
from infinity.tiers.state_layout import StateField, StateLayout
from infinity.zero.build import Runtime
from infinity.zero.partition import ParamInfo, ParamPart, UnitLayout

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class WrittenPart:
    """A part of a tensor that one rank has written, and its first element's position in the parameter."""

    key: str
    offset: int
    part: TensorPart


def write_shards(directory: Path, runtime: Runtime, *, frozen: bool) -> list[WrittenPart]:
    """Write this rank's shards of all units, and flush them to the drive.

    Args:
        frozen: write frozen parameters, too.

    Raises:
        OSError: writing failed, for example because the disk is full.
    """
    written: list[WrittenPart] = []
    with Staging() as staging:
        for unit in units_to_write(runtime):
            written += Shard(unit, runtime, (True, False) if frozen else (True,)).write(directory, staging)
    return written


def assemble(runtime: Runtime, written: list[list[WrittenPart]], *, frozen: bool) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint by key, from the parts that all ranks have written."""
    parts: dict[str, list[WrittenPart]] = {}
    for of_rank in written:
        for one in of_rank:
            parts.setdefault(one.key, []).append(one)
    tensors = {}
    for unit in runtime.partition.units:
        for info in unit.params:
            for key, dtype, shape, _ in tensors_of(info, runtime.layout, frozen=frozen):
                found = sorted(parts.get(key, []), key=lambda one: one.offset)
                tensors[key] = StoredTensor(DTYPE_NAMES[dtype], shape, tuple(one.part for one in found))
    return tensors


def units_to_write(runtime: Runtime) -> list[UnitLayout]:
    """Return the units whose shards this rank writes. Replicas divide the units, so that one of them writes each."""
    units, replicas = runtime.partition.units, runtime.groups.replicas
    if replicas.size == 1:
        return list(units)
    shares: list[list[UnitLayout]] = [[] for _ in range(replicas.size)]
    for unit in sorted(units, key=lambda unit: -unit.numel):
        min(shares, key=lambda share: sum(one.numel for one in share)).append(unit)
    return shares[replicas.rank]


def tensors_of(
    info: ParamInfo, layout: StateLayout, *, frozen: bool = True
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], StateField | None]]:
    """Yield (key, dtype, shape, field) of every stored tensor of a parameter. The field of a frozen one is None."""
    if info.trainable:
        for field in stored_fields(layout):
            yield f"{field.name}.{info.name}", field.dtype, stored_shape(field, info.shape), field
    elif frozen:
        yield f"{FROZEN_FIELD}.{info.name}", layout.param_dtype, info.shape, None


def part_shape(part: ParamPart, shape: tuple[int, ...], field: StateField | None) -> tuple[int, ...]:
    """Return the shape of a rank's part of a tensor: `shape` if it is the whole tensor, otherwise flat."""
    numel = part.stop - part.start
    if numel == part.info.numel:
        return shape
    return (numel if field is None else field.length(numel),)


class Shard:
    """Writes this rank's shard of a unit into a file.

    Args:
        kinds: which parameters are written: True for trained ones, False for frozen ones.
        label: a part of the file's name.
    """

    def __init__(
        self, unit: UnitLayout, runtime: Runtime, kinds: Collection[bool] = (True, False), label: str = ""
    ) -> None:
        self.unit = unit
        self._runtime = runtime
        self._name = f"unit-{unit.index:05d}{label}{runtime.partition.sharding.label}.safetensors"
        self._kinds = kinds
        self._specs: Specs = {}
        self._offsets: dict[str, int] = {}  # where each tensor begins in its parameter
        self._file: TensorFile | None = None
        for part in runtime.partition.parts(unit):
            if part.info.trainable in kinds:
                for key, dtype, shape, field in tensors_of(part.info, runtime.layout):
                    self._specs[key] = dtype, part_shape(part, shape, field)
                    self._offsets[key] = part.offset

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self._specs

    def write(self, directory: Path, staging: Staging) -> list[WrittenPart]:
        """Write the file and flush it, unless the shard is empty. No update may be pending."""
        if self.is_empty:
            return []
        self.open(directory, staging)
        with closing(self):
            for start, flat, fields in self.slices():
                self.append(start, flat, fields)
                self._runtime.ranks.progress()
            return self.finish()

    def open(self, directory: Path, staging: Staging) -> None:
        """Create the file."""
        self._file = TensorFile(directory / self._name, self._specs, staging)

    def slices(self) -> Iterator[tuple[int, torch.Tensor, Mapping[str, torch.Tensor]]]:
        """Yield (first element, values, optimizer's fields) of each tile. Frozen elements have no fields."""
        stop = 0
        with self._runtime.executor.resident(self._runtime.row(self.unit)) as flat:
            if True in self._kinds:
                for tile, fields in self._runtime.pipeline.tiles(self.unit.index, writable=False):
                    stop = tile.start + tile.numel
                    yield tile.start, flat[tile.start : stop], fields
            else:
                stop = trained_numel(self.unit, self._runtime)
            if stop < flat.numel() and False in self._kinds:
                yield stop, flat[stop:], {}

    def append(self, start: int, flat: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> None:
        """Write the next elements of the shard, which begin at element `start`."""
        assert self._file is not None
        for part in self._runtime.partition.parts(self.unit, start, start + flat.numel()):
            if part.info.trainable in self._kinds:
                self._write_part(self._file, part, start, flat, fields)

    def _write_part(
        self, file: TensorFile, part: ParamPart, start: int, flat: torch.Tensor, fields: Mapping[str, torch.Tensor]
    ) -> None:
        low, high = part.start - start, part.stop - start
        name, layout = part.info.name, self._runtime.layout
        if not part.info.trainable:
            file.write(f"{FROZEN_FIELD}.{name}", flat[low:high])
            return
        states = layout.narrow(fields, low, high)
        file.write(f"{MASTER_FIELD}.{name}", read_master(layout, flat[low:high], states))
        for field in layout.moment_fields:
            file.write(f"{field.name}.{name}", states[field.name])

    def finish(self) -> list[WrittenPart]:
        """Flush the file to the drive and close it. Return the parts that were written."""
        assert self._file is not None
        return [WrittenPart(key, self._offsets[key], part) for key, part in self._file.finish().items()]

    def close(self) -> None:
        """Close the file without flushing it. Does nothing after `finish`."""
        if self._file is not None:
            self._file.close()


def trained_numel(unit: UnitLayout, runtime: Runtime) -> int:
    """Return the number of elements in this rank's shard of a unit that are trained."""
    return unit.trainable_numel // runtime.partition.sharding.count
