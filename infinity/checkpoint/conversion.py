"""Convert checkpoints on disk, and moments during a load, to another state format or number of ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.codes import write_codes
from infinity.checkpoint.directory import check_tag, latest_tag, replacing, restore_interrupted
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.files import read_plain, write_file
from infinity.checkpoint.format import (
    CODE_FIELD,
    EXTRA,
    FROZEN_FIELD,
    MANIFEST,
    MASTER_FIELD,
    Manifest,
    check_replaceable,
    read_manifest,
)
from infinity.checkpoint.shards import part_shape, tensors_of
from infinity.checkpoint.stored import StoredReader, StoredTensor, check_files
from infinity.checkpoint.tensors import DTYPE_NAMES, TensorFile, TensorPart
from infinity.errors import CheckpointError, ConfigError
from infinity.kernels import Dither
from infinity.optim.formats import layout_with_moments, read_moments, write_moments
from infinity.tiers import Sharding
from infinity.tiers.state_layout import StateLayout
from infinity.zero.partition import Alignment, ParamInfo, UnitLayout, lay_out_unit

_CHUNK = 1 << 20  # elements; a multiple of every block of scales

_RANK = re.compile(r"-rank-\d+")

Progress = Callable[[int, int], None]  # (parameters converted, of how many)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    state_format: str | None = None,
    ranks: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Rewrite a checkpoint for another number of ranks, or in another state format, in bounded memory.

    Masters stay exact, as do moments that both formats store in the same dtype. Other moments are rounded as the new
    format rounds them, with random bits that depend only on the parameter and the position.

    Args:
        source: a checkpoint, or a directory of checkpoints, whose last saved one is taken.
        target: a directory of checkpoints. The new one gets the same tag and is loaded by default. If this is the
            source's directory, the new checkpoint replaces the old one when it is complete.
        state_format: `fp32`, `split`, `master`, `bf16` or `int8`; None for the source's.
        ranks: number of ranks that the shards are written for (stages 1 to 3).
        progress: called after every piece.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: the source is no checkpoint, or is damaged.
        ConfigError: the format is unknown, or the number of ranks is less than 1.
        StorageError: the target cannot be written.
    """
    if ranks < 1:
        raise ConfigError(f"a checkpoint of {ranks} ranks cannot be written: give 1 or more")
    path = checkpoint_at(Path(source))
    manifest = read_manifest(path)
    layout = layout_with_moments(state_format or manifest.state_format, *manifest.moments)
    tensors = check_files(path, manifest.tensors)
    read_extra(path, manifest)
    check_replaceable(Path(target) / path.name)
    conversion = _Conversion(manifest, layout, ranks, progress or (lambda done, total: None))
    in_place = Path(target).resolve() == path.parent.resolve()
    with (
        replacing(Path(target), path.name, mark_latest=not in_place) as directory,
        StoredReader(path, tensors) as reader,
        Staging() as staging,
    ):
        converted = conversion.write(directory, reader, staging)
        converted |= _copy_codes(directory, manifest, reader)
        write_file(directory / EXTRA, read_plain(path / EXTRA))
        new = replace(manifest, state_format=layout.format, tensors=converted, ranks=ranks)
        write_file(directory / MANIFEST, new.to_bytes())
    return Path(target) / path.name


def moments_of(
    reader: StoredReader, source: StateLayout, target: StateLayout, name: str, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """Return the moments of elements [start, stop) of parameter `name` in the format of `target`, by field.

    If the formats differ, the moments are rounded as `target` rounds them, with random bits that depend only on the
    parameter and the position. So the result does not depend on how a parameter is cut into pieces.
    """
    begin, slices = moment_slices(source, name, start, stop)
    states = {field.name: reader.read(*slice_) for field, slice_ in zip(source.moment_fields, slices, strict=True)}
    if source.moment_fields == target.moment_fields and begin == start:
        return states
    moments = {key: values[start - begin :] for key, values in read_moments(source, states).items()}
    converted = {f.name: torch.empty(f.length(stop - start), dtype=f.dtype, device="cpu") for f in target.moment_fields}
    write_moments(target, moments, converted, Dither(zlib.crc32(name.encode()), start))
    return converted


def moment_slices(layout: StateLayout, name: str, start: int, stop: int) -> tuple[int, list[tuple[str, int, int]]]:
    """Return what to read for the moments of elements `[start, stop)` of parameter `name`.

    Returns:
        The first element that is read, at most `start`, because a block shares one scale and is read as a whole; and
        (key, first element, number of elements) of each moment's tensor.
    """
    fields = layout.moment_fields
    begin = min((start // field.block * field.block for field in fields), default=start)
    return begin, [(f"{field.name}.{name}", begin // field.block, field.length(stop - begin)) for field in fields]


def checkpoint_at(source: Path, tag: str | None = None) -> Path:
    """Return the path of a checkpoint: `source / tag`, `source` itself, or the last saved one of directory `source`.

    Raises:
        CheckpointError: there is no checkpoint.
        ConfigError: `tag` is no plain name.
    """
    source = source.absolute()
    restore_interrupted(source)
    if tag is not None:
        check_tag(tag)
        return source / tag
    if (source / MANIFEST).exists():
        return source
    tag = latest_tag(source)
    if tag is None:
        raise CheckpointError(f"{source} is no checkpoint, and no directory of checkpoints")
    return source / tag


def _copy_codes(directory: Path, manifest: Manifest, reader: StoredReader) -> dict[str, StoredTensor]:
    """Copy the codes unchanged: they depend neither on the format nor on the number of ranks."""
    specs = {name: (tensor.torch_dtype, tensor.shape) for name, tensor in manifest.stored(CODE_FIELD).items()}
    return write_codes(directory, specs, lambda name: reader.whole(f"{CODE_FIELD}.{name}"), lambda: None)


def _file_of(tensor: StoredTensor) -> str:
    """Return the name of the file that a tensor is written to, without the rank."""
    return _RANK.sub("", tensor.parts[0].file) if tensor.parts else "empty.safetensors"


class _Conversion:
    """Rewrites the tensor files of a checkpoint."""

    def __init__(self, source: Manifest, layout: StateLayout, ranks: int, progress: Progress) -> None:
        self._source = source
        self._layout = layout
        self._ranks = ranks
        self._progress = progress
        self._done = 0
        self._units = self._lay_out(source)
        self._total = sum(info.numel for unit in self._units for info in unit.params)

    def _lay_out(self, source: Manifest) -> list[UnitLayout]:
        """Return a unit for each file of the source, laid out for the new ranks, in the manifest's order."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, tensor in source.tensors.items():
            kind, _, name = key.partition(".")
            if kind in (MASTER_FIELD, FROZEN_FIELD):
                shapes.setdefault(_file_of(tensor), {})[name] = tensor.shape
        trained = dict.fromkeys(source.stored(MASTER_FIELD), 0)
        align = Alignment.of(self._layout).for_ranks(self._ranks)
        return [
            lay_out_unit(index, name, of_unit, trained, align, persistent=False)
            for index, (name, of_unit) in enumerate(shapes.items())
        ]

    def write(self, directory: Path, reader: StoredReader, staging: Staging) -> dict[str, StoredTensor]:
        """Write all files of all ranks."""
        parts: dict[str, list[TensorPart]] = {}
        for unit in self._units:
            for rank in range(self._ranks):
                for key, part in self._write_shard(directory, unit, Sharding(rank, self._ranks), reader, staging):
                    parts.setdefault(key, []).append(part)
        return {
            key: StoredTensor(DTYPE_NAMES[dtype], shape, tuple(parts.get(key, ())))
            for unit in self._units
            for info in unit.params
            for key, dtype, shape, _ in tensors_of(info, self._layout)
        }

    def _write_shard(
        self, directory: Path, unit: UnitLayout, sharding: Sharding, reader: StoredReader, staging: Staging
    ) -> list[tuple[str, TensorPart]]:
        """Write one rank's shard of a unit, unless it is empty."""
        own = list(unit.parts(sharding))
        specs = {
            key: (dtype, part_shape(part, shape, field))
            for part in own
            for key, dtype, shape, field in tensors_of(part.info, self._layout)
        }
        if not specs:
            return []
        name = f"{unit.name.removesuffix('.safetensors')}{sharding.label}.safetensors"
        with closing(TensorFile(directory / name, specs, staging)) as file:
            for part in own:
                for start in range(part.param.start, part.param.stop, _CHUNK):
                    stop = min(start + _CHUNK, part.param.stop)
                    self._write_piece(file, reader, part.info, start, stop)
                    self._done += stop - start
                    self._progress(self._done, self._total)
            return list(file.finish().items())

    def _write_piece(self, file: TensorFile, reader: StoredReader, info: ParamInfo, start: int, stop: int) -> None:
        """Convert and write elements `[start, stop)` of a parameter."""
        name = info.name
        if not info.trainable:
            key = f"{FROZEN_FIELD}.{name}"
            file.write(key, reader.read(key, start, stop - start).to(self._layout.param_dtype))
            return
        file.write(f"{MASTER_FIELD}.{name}", reader.read(f"{MASTER_FIELD}.{name}", start, stop - start))
        for field, moment in moments_of(reader, self._source.layout, self._layout, name, start, stop).items():
            file.write(f"{field}.{name}", moment)
