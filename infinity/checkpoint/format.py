"""The files of a checkpoint. docs/checkpoints.md is the specification; this is its code.

One safetensors file a unit. A trainable parameter `w` has `master.w`, `exp_avg.w` and `exp_avg_sq.w`, all float32,
whatever format the engine kept them in; a frozen one has `param.w` in the compute dtype.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from infinity.errors import CheckpointError

VERSION = 1
MANIFEST = "manifest.json"
EXTRA = "extra.pt"
TRAINED_FIELDS = ("master", "exp_avg", "exp_avg_sq")
FROZEN_FIELD = "param"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors format limits it
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file.

    Attributes:
        start: byte offset from the start of the file.
        crc: CRC-32 of its bytes.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    crc: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        tensors: by key, `field.parameter`.
        steps: updates that each trainable parameter has had.
        counters: the engine's step counters.
        extra_crc: CRC-32 of the file with schedules, random states and the client's state.
    """

    tensors: Mapping[str, TensorEntry]
    steps: Mapping[str, int]
    counters: Mapping[str, int]
    extra_crc: int

    def write(self, directory: Path) -> None:
        content = {
            "format": VERSION,
            "counters": dict(self.counters),
            "extra_crc": self.extra_crc,
            "steps": dict(self.steps),
            "tensors": {key: asdict(entry) for key, entry in self.tensors.items()},
        }
        text = json.dumps(content, indent=1)
        write_file(directory / MANIFEST, text.encode())


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this version does not know.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != VERSION:
            raise CheckpointError(f"{path} has format {content['format']}; this version reads format {VERSION}")
        tensors = {key: _entry(values) for key, values in content["tensors"].items()}
        steps = {str(name): int(step) for name, step in content["steps"].items()}
        counters = {str(name): int(count) for name, count in content["counters"].items()}
        return Manifest(tensors, steps, counters, int(content["extra_crc"]))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {directory} is no checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _entry(values: Mapping[str, Any]) -> TensorEntry:
    entry = TensorEntry(
        file=str(values["file"]),
        dtype=str(values["dtype"]),
        shape=tuple(int(size) for size in values["shape"]),
        start=int(values["start"]),
        nbytes=int(values["nbytes"]),
        crc=int(values["crc"]),
    )
    if Path(entry.file).name != entry.file:
        raise ValueError(f"file name {entry.file!r} leaves the checkpoint")
    numel = 1
    for size in entry.shape:
        numel *= size
    if entry.dtype not in _DTYPES or numel * entry.torch_dtype.itemsize != entry.nbytes:
        raise ValueError(f"{entry.nbytes} bytes are no {entry.dtype} tensor of shape {entry.shape}")
    return entry


# Tensor files #


class TensorFile:
    """Writes one safetensors file whose tensors arrive in slices, each tensor's in order."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._path = path
        header: dict[str, Any] = {}
        offset = 0
        for key, (dtype, shape) in tensors.items():
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned
        self._data_start = 8 + len(text)
        self._header = header
        self._crc = dict.fromkeys(header, 0)
        self._written = dict.fromkeys(header, 0)
        self._file: BinaryIO = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, key: str, values: torch.Tensor) -> None:
        """Append 1-D `values` to tensor `key`."""
        data = values.contiguous().view(torch.uint8).numpy().data
        self._file.seek(self._data_start + self._header[key]["data_offsets"][0] + self._written[key])
        self._file.write(data)
        self._crc[key] = zlib.crc32(data, self._crc[key])
        self._written[key] += len(data)

    def finish(self) -> dict[str, TensorEntry]:
        """Flush to the drive; returns what a manifest says of the tensors."""
        _flush(self._file)
        self._file.close()
        entries = {}
        for key, values in self._header.items():
            begin, end = values["data_offsets"]
            if self._written[key] != end - begin:
                raise CheckpointError(f"tensor {key} has {self._written[key]} of its {end - begin} bytes")
            entries[key] = TensorEntry(
                self._path.name,
                values["dtype"],
                tuple(values["shape"]),
                self._data_start + begin,
                end - begin,
                self._crc[key],
            )
        return entries

    def abandon(self) -> None:
        """Close without finishing."""
        self._file.close()


def check_files(directory: Path, manifest: Manifest) -> None:
    """Read every tensor once and compare it with the manifest, and each file's header with it.

    Raises:
        CheckpointError: a file is missing, too short, or differs; the message names the file and the tensor.
    """
    by_file: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in manifest.tensors.items():
        by_file.setdefault(entry.file, {})[key] = entry
    for name, entries in by_file.items():
        path = directory / name
        try:
            with path.open("rb") as file:
                _check_header(path, file, entries)
                for key, entry in entries.items():
                    _check_tensor(path, file, key, entry)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    extra = directory / EXTRA
    if not extra.is_file() or zlib.crc32(extra.read_bytes()) != manifest.extra_crc:
        raise CheckpointError(f"{extra} is missing or damaged")


def _check_header(path: Path, file: BinaryIO, entries: Mapping[str, TensorEntry]) -> None:
    size = path.stat().st_size
    length_field = file.read(8)
    length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else -1
    if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(f"{path} is damaged: its header has length {length}")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header is no JSON") from error
    for key, entry in entries.items():
        values = header.get(key) if isinstance(header, dict) else None
        begin = entry.start - 8 - length
        expected = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, begin + entry.nbytes]}
        if values != expected:
            raise CheckpointError(f"{path} is damaged: its header and the manifest differ on tensor {key}")
        if entry.start + entry.nbytes > size:
            raise CheckpointError(f"{path} is truncated: tensor {key} ends at byte {entry.start + entry.nbytes}")


def _check_tensor(path: Path, file: BinaryIO, key: str, entry: TensorEntry) -> None:
    crc = 0
    file.seek(entry.start)
    left = entry.nbytes
    while left:
        data = file.read(min(left, _CHUNK_BYTES))
        if not data:
            raise CheckpointError(f"{path} is truncated within tensor {key}")
        crc = zlib.crc32(data, crc)
        left -= len(data)
    if crc != entry.crc:
        raise CheckpointError(f"{path} is damaged: tensor {key} has checksum {crc}, the manifest says {entry.crc}")


def read_slice(file: BinaryIO, entry: TensorEntry, start: int, numel: int) -> torch.Tensor:
    """Elements `[start, start + numel)` of a tensor, flat.

    Raises:
        CheckpointError: the file ends before them.
    """
    itemsize = entry.torch_dtype.itemsize
    file.seek(entry.start + start * itemsize)
    data = bytearray(numel * itemsize)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise CheckpointError(f"{entry.file} ended while it was being loaded")
    if not data:
        return torch.empty(0, dtype=entry.torch_dtype)
    return torch.frombuffer(data, dtype=entry.torch_dtype)


# Small files #


def write_file(path: Path, content: bytes) -> None:
    """Write a file and flush it to the drive."""
    with path.open("wb") as file:
        file.write(content)
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not needed again soon; leave RAM to training
