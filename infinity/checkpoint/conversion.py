"""From one state format to another: checkpoints on disk, and moments while they are loaded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import latest_tag, replacing, restore_interrupted
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.files import read_plain, write_file
from infinity.checkpoint.format import (
    EXTRA,
    FROZEN_FIELD,
    MANIFEST,
    MASTER,
    Manifest,
    check_replaceable,
    read_manifest,
    stored_fields,
    stored_shape,
)
from infinity.checkpoint.tensors import TensorEntry, TensorFile, TensorReader, check_files
from infinity.errors import CheckpointError
from infinity.kernels import Dither
from infinity.optim.formats import StateLayout, layout_with_moments, read_moments, write_moments

_CHUNK = 1 << 20  # elements; a multiple of every block of scales

Progress = Callable[[int, int], None]  # (parameters converted, of how many)


def convert(source: str | Path, target: str | Path, *, state_format: str, progress: Progress | None = None) -> Path:
    """Write a checkpoint again in another state format, in bounded memory.

    Masters stay exact, and so do moments that both formats keep in one dtype; others are rounded as the format
    rounds them, with random bits that depend on the parameter and the position alone.

    Args:
        source: a checkpoint, or a directory of checkpoints, of which the one that was saved last is taken.
        target: a directory of checkpoints; the new one gets the same tag there and is loaded by default. It may be the
            source's: the new checkpoint then takes the place of the old one when it is whole, and nothing else changes.
        state_format: `fp32`, `split`, `master`, `bf16` or `int8`.
        progress: called after every piece.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: the source is no checkpoint, or is damaged.
        ConfigError: there is no such format.
        StorageError: the target cannot be written.
    """
    path = _find(Path(source))
    manifest = read_manifest(path)
    layout = layout_with_moments(state_format, *manifest.moments)
    sums = check_files(path, manifest.tensors)
    read_extra(path, manifest)
    check_replaceable(Path(target) / path.name)
    conversion = _Conversion(manifest, layout, progress or (lambda done, total: None))
    in_place = Path(target).resolve() == path.parent.resolve()
    with (
        replacing(Path(target), path.name, mark_latest=not in_place) as directory,
        TensorReader(path, manifest.tensors, sums) as reader,
        Staging() as staging,
    ):
        tensors: dict[str, TensorEntry] = {}
        for name in dict.fromkeys(entry.file for entry in manifest.tensors.values()):
            tensors.update(conversion.file(directory / name, reader, staging))
        write_file(directory / EXTRA, read_plain(path / EXTRA))
        replace(manifest, state_format=state_format, tensors=tensors).write(directory)
    return Path(target) / path.name


def moments_of(
    reader: TensorReader, source: StateLayout, target: StateLayout, name: str, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """The moments of elements [start, stop) of parameter `name`, as format `target` keeps them, by field.

    Where the formats differ they are rounded as `target` does, with random bits that depend on the parameter and the
    position alone, so that any cutting into pieces gives the same numbers.
    """
    begin = start
    for field in source.moment_fields:
        begin = min(begin, start // field.block * field.block)  # scales belong to whole blocks
    states = {
        field.name: reader.read(f"{field.name}.{name}", begin // field.block, field.length(stop - begin))
        for field in source.moment_fields
    }
    if source.moment_fields == target.moment_fields and begin == start:
        return states
    moments = {key: values[start - begin :] for key, values in read_moments(source, states).items()}
    converted = {f.name: torch.empty(f.length(stop - start), dtype=f.dtype) for f in target.moment_fields}
    write_moments(target, moments, converted, Dither(zlib.crc32(name.encode()), start))
    return converted


def _find(source: Path) -> Path:
    """The checkpoint that is meant by a path.

    Raises:
        CheckpointError: there is none.
    """
    source = source.absolute()
    restore_interrupted(source)
    if (source / MANIFEST).exists():
        return source
    tag = latest_tag(source)
    if tag is None:
        raise CheckpointError(f"{source} is no checkpoint, and no directory of checkpoints")
    return source / tag


class _Conversion:
    """Rewrites tensor files."""

    def __init__(self, source: Manifest, layout: StateLayout, progress: Progress) -> None:
        self._source = source
        self._layout = layout
        self._progress = progress
        self._done = 0
        self._params: dict[str, dict[str, tuple[int, ...]]] = {}  # file -> key of its first tensor -> shape
        for key, entry in source.tensors.items():
            if key.startswith((f"{MASTER.name}.", f"{FROZEN_FIELD}.")):
                self._params.setdefault(entry.file, {})[key] = entry.shape
        self._total = sum(torch.Size(shape).numel() for keys in self._params.values() for shape in keys.values())

    def file(self, path: Path, reader: TensorReader, staging: Staging) -> dict[str, TensorEntry]:
        """Write one file's tensors to `path`."""
        file = TensorFile(path, self._tensors(path.name), staging)
        try:
            for key, shape in self._params.get(path.name, {}).items():
                numel = torch.Size(shape).numel()
                for start in range(0, numel, _CHUNK):
                    stop = min(start + _CHUNK, numel)
                    self._piece(file, reader, key, start, stop)
                    self._done += stop - start
                    self._progress(self._done, self._total)
        except BaseException:
            file.abandon()
            raise
        return file.finish()

    def _tensors(self, file_name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for key, shape in self._params.get(file_name, {}).items():
            kind, _, name = key.partition(".")
            if kind == FROZEN_FIELD:
                tensors[key] = (self._layout.param_dtype, shape)
                continue
            for field in stored_fields(self._layout):
                tensors[f"{field.name}.{name}"] = (field.dtype, stored_shape(field, shape))
        return tensors

    def _piece(self, file: TensorFile, reader: TensorReader, key: str, start: int, stop: int) -> None:
        values = reader.read(key, start, stop - start)
        kind, _, name = key.partition(".")
        if kind == FROZEN_FIELD:
            file.write(key, values.to(self._layout.param_dtype))
            return
        file.write(key, values)
        for field, moment in moments_of(reader, self._source.layout, self._layout, name, start, stop).items():
            file.write(f"{field}.{name}", moment)
