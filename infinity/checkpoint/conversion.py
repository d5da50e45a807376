"""From one state format to another: checkpoints on disk, and moments while they are loaded. Parts become whole."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.directory import check_tag, latest_tag, replacing, restore_interrupted
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
from infinity.checkpoint.stored import StoredReader, StoredTensor, TensorPart, check_files
from infinity.checkpoint.tensors import TensorFile
from infinity.errors import CheckpointError
from infinity.kernels import Dither
from infinity.optim.formats import StateLayout, layout_with_moments, read_moments, write_moments

_CHUNK = 1 << 20  # elements; a multiple of every block of scales

_RANK = re.compile(r"-rank-\d+")

Progress = Callable[[int, int], None]  # (parameters converted, of how many)


def convert(
    source: str | Path, target: str | Path, *, state_format: str | None = None, progress: Progress | None = None
) -> Path:
    """Write a checkpoint again as one rank writes it, in another state format if one is given, in bounded memory.

    Masters stay exact, and so do moments that both formats keep in one dtype; others are rounded as the format
    rounds them, with random bits that depend on the parameter and the position alone.

    Args:
        source: a checkpoint, or a directory of checkpoints, of which the one that was saved last is taken.
        target: a directory of checkpoints; the new one gets the same tag there and is loaded by default. It may be the
            source's: the new checkpoint then takes the place of the old one when it is whole, and nothing else changes.
        state_format: `fp32`, `split`, `master`, `bf16` or `int8`; None for the one that it has.
        progress: called after every piece.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: the source is no checkpoint, or is damaged.
        ConfigError: there is no such format.
        StorageError: the target cannot be written.
    """
    path = checkpoint_at(Path(source))
    manifest = read_manifest(path)
    layout = layout_with_moments(state_format or manifest.state_format, *manifest.moments)
    tensors = check_files(path, manifest.tensors)
    read_extra(path, manifest)
    check_replaceable(Path(target) / path.name)
    conversion = _Conversion(manifest, layout, progress or (lambda done, total: None))
    in_place = Path(target).resolve() == path.parent.resolve()
    with (
        replacing(Path(target), path.name, mark_latest=not in_place) as directory,
        StoredReader(path, tensors) as reader,
        Staging() as staging,
    ):
        converted: dict[str, StoredTensor] = {}
        for name in conversion.files:
            converted.update(conversion.file(directory / name, reader, staging))
        write_file(directory / EXTRA, read_plain(path / EXTRA))
        new = replace(manifest, state_format=layout.format, tensors=converted, ranks=1)
        write_file(directory / MANIFEST, new.to_bytes())
    return Path(target) / path.name


def moments_of(
    reader: StoredReader, source: StateLayout, target: StateLayout, name: str, start: int, stop: int
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


def checkpoint_at(source: Path, tag: str | None = None) -> Path:
    """The checkpoint that is meant by a path: itself, or of a directory of checkpoints the last one, or that of a tag.

    Raises:
        CheckpointError: there is none.
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


def _whole(tensor: StoredTensor) -> str:
    """Name of the file that a tensor is written to, whichever ranks had parts of it."""
    return _RANK.sub("", tensor.parts[0].file) if tensor.parts else "empty.safetensors"


class _Conversion:
    """Rewrites tensor files."""

    def __init__(self, source: Manifest, layout: StateLayout, progress: Progress) -> None:
        self._source = source
        self._layout = layout
        self._progress = progress
        self._done = 0
        self._params: dict[str, dict[str, tuple[int, ...]]] = {}  # file -> key of its first tensor -> shape
        for key, tensor in source.tensors.items():
            if key.startswith((f"{MASTER.name}.", f"{FROZEN_FIELD}.")):
                self._params.setdefault(_whole(tensor), {})[key] = tensor.shape
        self._total = sum(torch.Size(shape).numel() for keys in self._params.values() for shape in keys.values())

    @property
    def files(self) -> list[str]:
        """Names of the files to write."""
        return list(self._params)

    def file(self, path: Path, reader: StoredReader, staging: Staging) -> dict[str, StoredTensor]:
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
        return {
            key: StoredTensor(
                entry.dtype, entry.shape, (TensorPart(entry.file, entry.start, math.prod(entry.shape), sums),)
            )
            for key, (entry, sums) in file.finish().items()
        }

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

    def _piece(self, file: TensorFile, reader: StoredReader, key: str, start: int, stop: int) -> None:
        values = reader.read(key, start, stop - start)
        kind, _, name = key.partition(".")
        if kind == FROZEN_FIELD:
            file.write(key, values.to(self._layout.param_dtype))
            return
        file.write(key, values)
        for field, moment in moments_of(reader, self._source.layout, self._layout, name, start, stop).items():
            file.write(f"{field}.{name}", moment)
