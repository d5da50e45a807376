"""Write and read slices of tensors in safetensors files, with checksums of their blocks."""

from __future__ import annotations

import json
import math
import os
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from infinity.checkpoint.blocks import OutputFile, Staging
from infinity.checkpoint.files import brief, open_plain, parse_json
from infinity.checkpoint.sums import BLOCK_BYTES, BlockSums
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
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors format limits it
_MAX_COUNT = 1 << 62  # of bytes or elements


@dataclass(frozen=True)
class TensorEntry:
    """The place of a tensor in its file.

    Attributes:
        start: byte offset from the start of the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class TensorPart:
    """Consecutive elements of a tensor, in one file.

    Attributes:
        start: byte offset from the start of the file.
        numel: number of elements.
        sums: CRC-32 of each block of its bytes.
        block_bytes: length of the blocks; the last one may be shorter.
    """

    file: str
    start: int
    numel: int
    sums: array[int]
    block_bytes: int = BLOCK_BYTES


class TensorFile:
    """Writes one safetensors file whose tensors arrive in slices, each tensor's in order.

    Args:
        tensors: dtype and shape by key.
        staging: buffers, which several files may share.
        metadata: further entries of the header.
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
        for key, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):  # aligns all tensors
            if dtype not in DTYPE_NAMES:
                raise CheckpointError(
                    f"{path}: {key} is {dtype}, which safetensors has no name for: leave it out, or cast it"
                )
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        notes = {} if metadata is None else {"__metadata__": dict(metadata)}
        text = json.dumps(notes | header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the data
        self._data_start = 8 + len(text)
        self._header = header
        self._sums = {key: BlockSums() for key in header}
        self._written = dict.fromkeys(header, 0)
        self._file = OutputFile(path, self._data_start + offset, staging)
        self._file.write(memoryview(struct.pack("<Q", len(text)) + text), 0)

    def write(self, key: str, values: torch.Tensor) -> None:
        """Append 1-D `values` to tensor `key`."""
        data = values.contiguous().view(torch.uint8).numpy().data
        self._file.write(data, self._data_start + self._header[key]["data_offsets"][0] + self._written[key])
        self._sums[key].add(data)
        self._written[key] += len(data)

    def finish(self) -> dict[str, TensorPart]:
        """Flush the file to the drive and close it. Return the place of each tensor."""
        self._file.finish()
        written = {}
        for key, values in self._header.items():
            begin, end = values["data_offsets"]
            if self._written[key] != end - begin:
                raise CheckpointError(f"tensor {key} has {self._written[key]} of its {end - begin} bytes")
            start, numel = self._data_start + begin, math.prod(values["shape"])
            written[key] = TensorPart(self._path.name, start, numel, self._sums[key].sums)
        return written

    def close(self) -> None:
        """Close the file without flushing it. Does nothing after `finish`."""
        self._file.close()


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the places of the tensors of any safetensors file. The file is not trusted.

    Raises:
        CheckpointError: the file cannot be read, or its header is invalid.
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
                f"{path}: tensor {shown(key)} is of a kind that cannot be read: {brief(values)}"
            ) from error
        if not right or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path} is damaged: tensor {shown(key)} has another size than its shape")
        if data_start + end > size:
            raise CheckpointError(f"{path} is truncated: tensor {shown(key)} ends at byte {data_start + end}")
        entries[key] = TensorEntry(path.name, values["dtype"], shape, data_start + begin, end - begin)
    _check_cover(path, entries, data_start, size)
    return entries


def _check_cover(path: Path, entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """Check that every byte of the data belongs to exactly one tensor, as the format requires."""
    position, before = data_start, "the header"
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != position:
            how = "overlaps" if entry.start < position else "leaves a gap after"
            raise CheckpointError(f"{path} is damaged: tensor {shown(key)} {how} {before}")
        position, before = entry.start + entry.nbytes, f"tensor {shown(key)}"
    if position != size:
        raise CheckpointError(f"{path} is damaged: its last {size - position} bytes belong to no tensor")


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a file, the byte offset of its data, and the file's size."""
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            length_field = file.read(8)
            if len(length_field) < 8:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes, too few for a safetensors file")
            length = struct.unpack("<Q", length_field)[0]
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path} is damaged: its header has length {length}, and the file has {size} bytes"
                )
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


def shown(key: str) -> str:
    """Return a tensor's name for a message, shortened if it is long or not printable."""
    return key if len(key) <= 200 and key.isprintable() else brief(key)


class RangeReader:
    """Reads ranges of plain files of a directory. One file is open at a time: callers read file by file.

    Args:
        once: the files are not read again soon: drop them from the page cache.
        passing: reuse one buffer. The result of `read` is valid only until the next call.
    """

    def __init__(self, directory: Path, *, once: bool = True, passing: bool = False) -> None:
        self._directory = directory
        self._once = once
        self._passing = passing
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def read(self, name: str, start: int, nbytes: int, key: str) -> torch.Tensor:
        """Return `nbytes` bytes (uint8) from offset `start` of file `name`, which belong to tensor `key`.

        Raises:
            CheckpointError: the file cannot be read, or is too short.
        """
        path = self._directory / name
        data = self._buffer(nbytes)
        try:
            file = self._open(path)
            file.seek(start)
            length = file.readinto(data.numpy().data)  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if length != nbytes:
            raise CheckpointError(f"{path} ended while tensor {key} was read")
        return data

    def read_elements(self, key: str, entry: TensorEntry, start: int, numel: int) -> torch.Tensor:
        """Return elements `[start, start + numel)` of a tensor, flat. Raises as `read`."""
        dtype = entry.torch_dtype
        return self.read(entry.file, entry.start + start * dtype.itemsize, numel * dtype.itemsize, key).view(dtype)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        if not self._passing:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._memory[:nbytes]

    def _open(self, path: Path) -> BinaryIO:
        if self._file is None or path != self._path:
            self.close()
            self._file, self._path = open_plain(path), path
        return self._file

    def close(self) -> None:
        if self._file is not None:
            if self._once:
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # keep host memory for training
            self._file.close()
            self._file = None
