"""Tensors in safetensors files: written in slices, checked whole, read in slices."""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from infinity.checkpoint.blocks import OutputFile, Staging
from infinity.checkpoint.files import brief, open_plain, parse_json
from infinity.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors format limits it
_MAX_COUNT = 1 << 62  # of bytes or elements
_CHUNK_BYTES = 8 << 20
_SUM_BYTES = 256 << 10
_CHECK_THREADS = 4  # reading and checksums leave Python's lock alone

# CRC-32 of each tensor up to the end of each of its blocks of `_SUM_BYTES`, by key. With it a block is verified alone:
# the checksum goes on from the end of the block before.
RunningSums = Mapping[str, "array[int]"]


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
        return DTYPES[self.dtype]


class TensorFile:
    """Writes one safetensors file whose tensors arrive in slices, each tensor's in order.

    Args:
        tensors: dtype and shape by key.
        staging: memory that several files may share, one after the other or together.
        metadata: what the header says beside them.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        staging: Staging,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        header: dict[str, Any] = {}
        offset = 0
        for key, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):  # keeps all aligned
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        notes = {} if metadata is None else {"__metadata__": dict(metadata)}
        text = json.dumps(notes | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts aligned
        self._data_start = 8 + len(text)
        self._header = header
        self._crc = dict.fromkeys(header, 0)
        self._written = dict.fromkeys(header, 0)
        self._file = OutputFile(path, self._data_start + offset, staging)
        self._file.write(memoryview(struct.pack("<Q", len(text)) + text), 0)

    def write(self, key: str, values: torch.Tensor) -> None:
        """Append 1-D `values` to tensor `key`."""
        data = values.contiguous().view(torch.uint8).numpy().data
        self._file.write(data, self._data_start + self._header[key]["data_offsets"][0] + self._written[key])
        self._crc[key] = zlib.crc32(data, self._crc[key])
        self._written[key] += len(data)

    def finish(self) -> dict[str, TensorEntry]:
        """Flush to the drive; returns what a manifest says of the tensors."""
        self._file.finish()
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


def check_files(directory: Path, tensors: Mapping[str, TensorEntry]) -> RunningSums:
    """Read every tensor once and compare it with its entry, and each file's header with the entries.

    Returns:
        What a `TensorReader` verifies by that it reads the same again.

    Raises:
        CheckpointError: a file is missing, too short, or differs; the message names the file and the tensor.
    """
    by_file: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        by_file.setdefault(entry.file, {})[key] = entry
    sums: dict[str, array[int]] = {}
    with ThreadPoolExecutor(min(_CHECK_THREADS, os.cpu_count() or 1)) as pool:
        checks = [pool.submit(_check_file, directory / name, entries) for name, entries in by_file.items()]
        try:
            for check in checks:
                sums.update(check.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return sums


def _check_file(path: Path, entries: Mapping[str, TensorEntry]) -> RunningSums:
    try:
        _check_header(path, entries)
        with open_plain(path) as file:
            return {key: _check_tensor(path, file, key, entry) for key, entry in entries.items()}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Where the tensors of any safetensors file lie; their checksums are not known and 0.

    Raises:
        CheckpointError: the file cannot be read, or its header is wrong; nothing of it is trusted.
    """
    header, data_start, size = _header(path)
    header.pop("__metadata__", None)
    entries = {}
    for key, values in header.items():
        try:
            begin, end = values["data_offsets"]
            dtype, shape = DTYPES[values["dtype"]], tuple(values["shape"])
            right = all(type(n) is int and 0 <= n < _MAX_COUNT for n in (begin, end, *shape))
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: tensor {_shown(key)} is of a kind that cannot be read: {brief(values)}"
            ) from error
        if not right or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} is damaged: tensor {_shown(key)} has another size than its shape")
        if data_start + end > size:
            raise CheckpointError(f"{path} is truncated: tensor {_shown(key)} ends at byte {data_start + end}")
        entries[key] = TensorEntry(path.name, values["dtype"], shape, data_start + begin, end - begin, 0)
    _check_cover(path, entries, data_start, size)
    return entries


def _check_cover(path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The format has every byte belong to one tensor."""
    position, before = data_start, "the header"
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != position:
            how = "overlaps" if entry.start < position else "leaves a gap after"
            raise CheckpointError(f"{path} is damaged: tensor {_shown(key)} {how} {before}")
        position, before = entry.start + entry.nbytes, f"tensor {_shown(key)}"
    if position != size:
        raise CheckpointError(f"{path} is damaged: its last {size - position} bytes belong to no tensor")


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a file, where its data starts, and the file's size."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length_field = file.read(8)
            length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else -1
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path} is damaged: its header has length {length}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        header = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no JSON object")
    return header, 8 + length, size


def _shown(key: str) -> str:
    """A tensor's name, as a message can show it."""
    return key if len(key) <= 200 and key.isprintable() else brief(key)


def _check_header(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    header = read_header(path)
    for key, entry in entries.items():
        if header.get(key) != replace(entry, crc=0):
            raise CheckpointError(f"{path} is damaged: its header and the manifest differ on tensor {_shown(key)}")


def _check_tensor(path: Path, file: BinaryIO, key: str, entry: TensorEntry) -> array[int]:
    crc = 0
    sums = array("I")
    file.seek(entry.start)
    for start in range(0, entry.nbytes, _CHUNK_BYTES):
        data = file.read(min(entry.nbytes - start, _CHUNK_BYTES))
        if len(data) < min(entry.nbytes - start, _CHUNK_BYTES):
            raise CheckpointError(f"{path} is truncated within tensor {key}")
        with memoryview(data) as view:
            for block in range(0, len(data), _SUM_BYTES):
                crc = zlib.crc32(view[block : block + _SUM_BYTES], crc)
                sums.append(crc)
    if crc != entry.crc:
        raise CheckpointError(f"{path} is damaged: tensor {key} has checksum {crc}, the manifest says {entry.crc}")
    return sums


class TensorReader:
    """Reads slices of tensors; a context manager.

    Args:
        tensors: where each one lies, by key.
        sums: what they held when they were checked; None to read them as they are.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorEntry], sums: RunningSums | None = None) -> None:
        self._directory = directory
        self._tensors = tensors
        self._sums = sums
        self._path: Path | None = None
        self._file: BinaryIO | None = None  # one at a time: tensors are visited file by file

    def read(self, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements `[start, start + numel)` of a tensor, flat.

        Raises:
            CheckpointError: the file cannot be read, ends before them, or has changed since it was checked.
        """
        entry = self._tensors[key]
        dtype = entry.torch_dtype
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        low, high = begin, end = start * dtype.itemsize, (start + numel) * dtype.itemsize
        if self._sums is not None:  # whole blocks
            low, high = begin // _SUM_BYTES * _SUM_BYTES, min(-(-end // _SUM_BYTES) * _SUM_BYTES, entry.nbytes)
        data = self._read(key, entry, low, high)
        if self._sums is not None:
            self._verify(key, entry, data, low // _SUM_BYTES, self._sums[key])
        return torch.frombuffer(data, dtype=dtype, count=numel, offset=begin - low)

    def _read(self, key: str, entry: TensorEntry, low: int, high: int) -> bytearray:
        path = self._directory / entry.file
        data = bytearray(high - low)
        try:
            file = self._open(path)
            file.seek(entry.start + low)
            length = file.readinto(data)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if length != len(data):
            raise CheckpointError(f"{path} ended while tensor {key} was read")
        return data

    def _verify(self, key: str, entry: TensorEntry, data: bytearray, first: int, sums: array[int]) -> None:
        with memoryview(data) as view:
            for index, start in enumerate(range(0, len(data), _SUM_BYTES), start=first):
                crc = zlib.crc32(view[start : start + _SUM_BYTES], sums[index - 1] if index else 0)
                if crc != sums[index]:
                    raise CheckpointError(
                        f"{self._directory / entry.file} is not what was checked: tensor {key} differs near byte "
                        f"{entry.start + index * _SUM_BYTES} (the file has changed, or is another one on this rank)"
                    )

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = open_plain(path), path
        return self._file

    def close(self) -> None:
        if self._file is not None:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # leave RAM to training
            self._file.close()
            self._file = None

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
