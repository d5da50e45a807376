"""Read and verify tensors of a checkpoint. A tensor is in parts, which the ranks wrote into files of their own.

[Note: what is verified]
The manifest has a CRC-32 of each block of every part. So any rank can read and verify any slice, independent of which
rank wrote it and of the rest of the file. Always whole blocks are read. Checkpoints of format 2 have one checksum a
tensor: there a tensor is one block of its own length, and `check_files` computes the checksums of usual blocks once.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.sums import BLOCK_BYTES, BlockSums, crc32
from infinity.checkpoint.tensors import (
    DTYPE_NAMES,
    DTYPES,
    RangeReader,
    TensorEntry,
    TensorFile,
    TensorPart,
    read_header,
    shown,
)
from infinity.errors import CheckpointError

_CHECK_BYTES = 16 * BLOCK_BYTES  # read at once for a check
_RANK = re.compile(r"-rank-(\d+)\.safetensors$")
CHECK_THREADS = 4  # of all ranks of a machine together; reads and checksums release the GIL

Progress = Callable[[int], object]  # called with the bytes checked since the last call, from several threads


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, which is the concatenation of its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize

    @cached_property
    def firsts(self) -> list[int]:
        """The position of each part's first element in the tensor."""
        return list(accumulate((part.numel for part in self.parts[:-1]), initial=0))

    def overlapping(self, start: int, stop: int) -> Iterable[tuple[TensorPart, int, int]]:
        """Yield (part, first, end) for each part with elements of `[start, stop)`, in elements of the part."""
        for index in range(max(bisect_right(self.firsts, start) - 1, 0), len(self.parts)):
            part, first = self.parts[index], self.firsts[index]
            if first >= stop:
                return
            low, high = max(start - first, 0), min(stop - first, part.numel)
            if low < high:
                yield part, low, high


def write_whole(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    pieces: Callable[[str], Iterable[torch.Tensor]],
    staging: Staging,
) -> dict[str, StoredTensor]:
    """Write whole tensors into one file, and flush it to the drive.

    Args:
        tensors: dtype and shape by key.
        pieces: returns the elements of a tensor in order, flat and in host memory.

    Raises:
        CheckpointError: the file format has no name for a dtype.
        OSError: writing failed.
    """
    with closing(TensorFile(path, tensors, staging)) as file:
        for key in tensors:
            for piece in pieces(key):
                file.write(key, piece)
        written = file.finish()
    return {key: StoredTensor(DTYPE_NAMES[tensors[key][0]], tensors[key][1], (part,)) for key, part in written.items()}


class StoredReader:
    """Reads and verifies slices of a checkpoint's tensors; a context manager.

    Args:
        checked: the slices have been verified before, and are now read for the last time: the message of a difference
            says that the file has changed. If False, the reader is only for `check`.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, StoredTensor], *, checked: bool = True) -> None:
        self._directory = directory
        self._tensors = tensors
        self._checked = checked
        self._files = RangeReader(directory, once=checked, passing=not checked)

    def read(self, key: str, start: int, numel: int) -> torch.Tensor:
        """Read elements `[start, start + numel)` of a tensor, flat.

        Raises:
            CheckpointError: a file cannot be read, is too short, or differs from its checksums.
        """
        tensor = self._tensors[key]
        slices = [self._read(key, tensor, *found) for found in tensor.overlapping(start, start + numel)]
        if len(slices) == 1:
            return slices[0]
        return torch.cat(slices) if slices else torch.empty(0, dtype=tensor.torch_dtype, device="cpu")

    def whole(self, key: str) -> torch.Tensor:
        """Read a whole tensor, in its shape. Raises as `read`."""
        tensor = self._tensors[key]
        return self.read(key, 0, tensor.numel).view(tensor.shape)

    def check(self, key: str, start: int, numel: int) -> int:
        """Verify elements `[start, start + numel)` of a tensor, and return their number of bytes.

        Raises:
            CheckpointError: as `read`.
        """
        tensor = self._tensors[key]
        return sum(self._read(key, tensor, *found).nbytes for found in tensor.overlapping(start, start + numel))

    def _read(self, key: str, tensor: StoredTensor, part: TensorPart, low: int, high: int) -> torch.Tensor:
        """Read elements `[low, high)` of a part, flat."""
        dtype, block = tensor.torch_dtype, part.block_bytes
        begin, end = low * dtype.itemsize, high * dtype.itemsize
        first = begin // block
        from_byte, to_byte = first * block, min(-(-end // block) * block, part.numel * dtype.itemsize)
        data = self._files.read(part.file, part.start + from_byte, to_byte - from_byte, key)
        view = data.numpy().data
        for index, start in enumerate(range(0, len(view), block), start=first):
            if crc32(view[start : start + block]) != part.sums[index]:
                raise self._wrong(key, part, index)
        return data[begin - from_byte : end - from_byte].view(dtype)

    def _wrong(self, key: str, part: TensorPart, block: int) -> CheckpointError:
        where = f"tensor {shown(key)} differs near byte {part.start + block * part.block_bytes}"
        if self._checked:
            return CheckpointError(
                f"{self._directory / part.file} is not what was checked: {where} (the file has changed)"
            )
        return CheckpointError(f"{self._directory / part.file} is damaged: {where}")

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> StoredReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_headers(directory: Path, tensors: Mapping[str, StoredTensor], files: Iterable[str]) -> None:
    """Check that the headers of these files agree with the manifest.

    Raises:
        CheckpointError: a header differs, or a file cannot be read.
    """
    expected: dict[str, dict[str, TensorEntry]] = {name: {} for name in files}
    for key, tensor in tensors.items():
        for part in tensor.parts:
            if part.file in expected:
                shape = tensor.shape if len(tensor.parts) == 1 else (part.numel,)
                nbytes = part.numel * tensor.torch_dtype.itemsize
                expected[part.file][key] = TensorEntry(part.file, tensor.dtype, shape, part.start, nbytes)
    for name, entries in expected.items():
        _check_there(directory / name)
        header = read_header(directory / name)
        for key, entry in entries.items():
            if header.get(key) != entry:
                raise CheckpointError(
                    f"{directory / name} is damaged: its header and the manifest differ on tensor {shown(key)}"
                )


def _check_there(path: Path) -> None:
    found = _RANK.search(path.name)
    if found is not None and not os.path.lexists(path):
        raise CheckpointError(
            f"{path} cannot be read: No such file or directory. Rank {int(found[1])} of the run that saved the "
            "checkpoint wrote it, maybe into a directory of its own machine: copy it here, or start this rank on that "
            "machine"
        )


def check_slices(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    slices: Iterable[tuple[str, int, int]],
    *,
    threads: int = CHECK_THREADS,
    progress: Progress = lambda nbytes: None,
) -> None:
    """Verify slices `(key, first element, number of elements)` and the headers of their files.

    Raises:
        CheckpointError: a file is missing, too short or differs; the message names the file and the tensor.
    """
    by_file: dict[str, list[tuple[str, int, int]]] = {}  # by the file in which a slice begins
    files: dict[str, None] = {}
    for key, start, numel in slices:
        found = [part.file for part, _, _ in tensors[key].overlapping(start, start + numel)]
        files.update(dict.fromkeys(found))
        if found:
            by_file.setdefault(found[0], []).append((key, start, numel))
    check_headers(directory, tensors, files)

    def check(wanted: list[tuple[str, int, int]]) -> None:
        with StoredReader(directory, tensors, checked=False) as reader:
            for key, start, numel in wanted:
                step = _CHECK_BYTES // tensors[key].torch_dtype.itemsize
                for first in range(start, start + numel, step):
                    progress(reader.check(key, first, min(step, start + numel - first)))

    _in_threads(check, by_file.values(), threads)


def check_files(
    directory: Path, tensors: Mapping[str, StoredTensor], progress: Progress = lambda nbytes: None
) -> dict[str, StoredTensor]:
    """Read and verify all tensors.

    Returns:
        The tensors with checksums of usual blocks, also for a checkpoint of format 2.

    Raises:
        CheckpointError: a file is missing, too short or differs; the message names the file and the tensor.
    """
    usual = {key: tensor for key, tensor in tensors.items() if all(p.block_bytes == BLOCK_BYTES for p in tensor.parts)}
    check_slices(directory, tensors, [(key, 0, tensor.numel) for key, tensor in usual.items()], progress=progress)
    others = {key: tensor for key, tensor in tensors.items() if key not in usual}
    check_headers(directory, tensors, {part.file for tensor in others.values() for part in tensor.parts})
    found = dict(tensors)

    def check(key: str) -> None:
        parts = [_with_usual_sums(directory, key, tensors[key], part, progress) for part in tensors[key].parts]
        found[key] = replace(tensors[key], parts=tuple(parts))

    _in_threads(check, others, CHECK_THREADS)
    return found


def _with_usual_sums(
    directory: Path, key: str, tensor: StoredTensor, part: TensorPart, progress: Progress
) -> TensorPart:
    """Verify a part that has one checksum, and return it with the checksums of its blocks."""
    sums, crc = BlockSums(), 0
    nbytes = part.numel * tensor.torch_dtype.itemsize
    with closing(RangeReader(directory, once=False, passing=True)) as files:
        for start in range(0, nbytes, _CHECK_BYTES):
            data = files.read(part.file, part.start + start, min(_CHECK_BYTES, nbytes - start), key).numpy().data
            crc = crc32(data, crc)
            sums.add(data)
            progress(len(data))
    if part.sums and crc != part.sums[0]:
        raise CheckpointError(
            f"{directory / part.file} is damaged: tensor {shown(key)} has checksum {crc}, the manifest says "
            f"{part.sums[0]}"
        )
    return replace(part, sums=sums.sums, block_bytes=BLOCK_BYTES)


def _in_threads(action: Callable[..., None], items: Iterable[object], threads: int) -> None:
    with ThreadPoolExecutor(max(1, min(threads, os.cpu_count() or 1))) as pool:
        running = [pool.submit(action, item) for item in items]
        try:
            for one in running:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
