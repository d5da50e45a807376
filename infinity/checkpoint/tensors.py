"""Tensors in safetensors files: written in slices, checked whole, read in slices."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from infinity.checkpoint.blocks import OutputFile, Staging
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
_CHUNK_BYTES = 8 << 20
_CHECK_THREADS = 4  # reading and checksums leave Python's lock alone


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


def check_files(directory: Path, tensors: Mapping[str, TensorEntry]) -> None:
    """Read every tensor once and compare it with its entry, and each file's header with the entries.

    Raises:
        CheckpointError: a file is missing, too short, or differs; the message names the file and the tensor.
    """
    by_file: dict[str, dict[str, TensorEntry]] = {}
    for key, entry in tensors.items():
        by_file.setdefault(entry.file, {})[key] = entry
    with ThreadPoolExecutor(min(_CHECK_THREADS, os.cpu_count() or 1)) as pool:
        checks = [pool.submit(_check_file, directory / name, entries) for name, entries in by_file.items()]
        try:
            for check in checks:
                check.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_file(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    try:
        _check_header(path, entries)
        with path.open("rb") as file:
            for key, entry in entries.items():
                _check_tensor(path, file, key, entry)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Where the tensors of any safetensors file lie; their checksums are not known and 0.

    Raises:
        CheckpointError: the file cannot be read, or its header is wrong; nothing of it is trusted.
    """
    try:
        header, data_start = _header(path)
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    entries = {}
    for key, values in header.items():
        try:
            begin, end = values["data_offsets"]
            dtype, shape = DTYPES[values["dtype"]], tuple(values["shape"])
            right = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
            right = right and end - begin == torch.Size(shape).numel() * dtype.itemsize
        except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{path}: tensor {key} is of a kind that cannot be read: {values}") from error
        if not right or data_start + end > size:
            raise CheckpointError(f"{path} is damaged: tensor {key} lies outside of the file or has another size")
        entries[key] = TensorEntry(path.name, values["dtype"], shape, data_start + begin, end - begin, 0)
    return entries


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where its data starts."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length_field = file.read(8)
        length = struct.unpack("<Q", length_field)[0] if len(length_field) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} is damaged: its header has length {length}")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header is no JSON") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is no JSON object")
    return header, 8 + length


def _check_header(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    size = path.stat().st_size
    header, data_start = _header(path)
    for key, entry in entries.items():
        begin = entry.start - data_start
        expected = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, begin + entry.nbytes]}
        if header.get(key) != expected:
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


class TensorReader:
    """Reads slices of tensors; a context manager.

    Args:
        tensors: where each one lies, by key.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self._directory = directory
        self._tensors = tensors
        self._path: Path | None = None
        self._file: BinaryIO | None = None  # one at a time: tensors are visited file by file

    def read(self, key: str, start: int, numel: int) -> torch.Tensor:
        """Elements `[start, start + numel)` of a tensor, flat.

        Raises:
            CheckpointError: the file cannot be read, or ends before them.
        """
        entry = self._tensors[key]
        data = bytearray(numel * entry.torch_dtype.itemsize)
        try:
            file = self._open(self._directory / entry.file)
            file.seek(entry.start + start * entry.torch_dtype.itemsize)
            length = file.readinto(data)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{self._directory / entry.file} cannot be read: {error.strerror}") from error
        if length != len(data):
            raise CheckpointError(f"{self._directory / entry.file} ended while tensor {key} was read")
        if not data:
            return torch.empty(0, dtype=entry.torch_dtype)
        return torch.frombuffer(data, dtype=entry.torch_dtype)

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = path.open("rb"), path
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


# Small files #


def write_file(path: Path, content: bytes) -> None:
    """Write a file and flush it to the drive."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
