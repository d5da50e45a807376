"""Read files that another program wrote with `torch.save`, without running code that they name.

torch's restricted unpickler makes tensors, plain containers and objects of classes in a list. For every other class or
function that a file names, the list gets a subclass of `ForeignObject`, which only stores its arguments and state.

[Note: tensors that stay in the file]
torch would map the file into memory, and a file that is truncated meanwhile then kills the process by SIGBUS. So large
tensors are on the meta device, their storage stores the place of its bytes, and `elements` reads the bytes when they
are needed, with calls that return errors. The checksums of the whole file are compared before.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import _weights_only_unpickler
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from infinity.checkpoint.files import brief, open_plain
from infinity.checkpoint.tensors import RangeReader
from infinity.errors import CheckpointError

_SMALL_BYTES = 1 << 20  # storages up to this size are read at once, and do not stay in the file
_PLAIN = (torch.Tensor, str, bytes, int, float, bool, type(None), torch.dtype)


class ForeignObject:
    """Stands for an object of an unknown class, or for the result of an unknown function.

    Attributes:
        name: name of the class or function.
        arguments: the arguments of the call.
        state: the state that unpickling would have set.
    """

    name = ""

    def __init__(self, *arguments: Any) -> None:
        """Ignore the arguments: `__new__` stores them."""

    def __new__(cls, *arguments: Any) -> ForeignObject:
        made = super().__new__(cls)
        made.arguments = arguments
        made.state = {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an item, if the class is a mapping."""

    def append(self, value: Any) -> None:
        """Ignore an item, if the class is a list."""

    def extend(self, values: Any) -> None:
        """Ignore items, if the class is a list."""

    def get(self, name: str) -> Any:
        """Return an attribute of the object; None if it has none of this name."""
        return self.state.get(name) if isinstance(self.state, Mapping) else None


def read_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a file of `torch.save`. Large tensors stay in the file, see `elements` and `whole`.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or holds no dictionary of `torch.save`.
    """
    with open_plain(path) as file:
        try:
            archive = zipfile.ZipFile(file)
            check_sums(archive)
            names = get_unsafe_globals_in_checkpoint(str(path))
            foreign: list[Any] = [(type("ForeignObject", (ForeignObject,), {"name": name}), name) for name in names]
            with safe_globals(foreign):
                content = _Storages(path, file, archive).unpickled()
        except Exception as error:  # damaged content can raise any exception
            raise CheckpointError(f"{path} cannot be read without running code of it: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not the dictionary that a checkpoint is")
    return content


def check_sums(archive: zipfile.ZipFile) -> None:
    """Compare every entry of an archive with its checksum, which torch's readers do not do.

    Raises:
        zipfile.BadZipFile: an entry is damaged, or the file begins with bytes that are no part of the archive.
    """
    entries = archive.infolist()
    if not entries or min(entry.header_offset for entry in entries) != 0:
        raise zipfile.BadZipFile("something lies before its first entry")
    if not any(entry.CRC for entry in entries):  # saved without checksums, see torch.serialization.set_crc32_options
        for entry in entries:
            entry.CRC = None  # type: ignore[assignment]  # zipfile then compares nothing
    else:
        differing = archive.testzip()
        if differing is not None:
            raise zipfile.BadZipFile(f"the checksum of its entry {brief(differing)} differs from what is there")


# Tensors that stay in the file #


@dataclass(frozen=True)
class _Place:
    """The place of a storage's bytes in a file."""

    path: Path
    key: str
    start: int
    nbytes: int

    def read(self, first: int, nbytes: int) -> torch.Tensor:
        """Read `nbytes` bytes from byte `first` of the storage.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        if not 0 <= first <= first + nbytes <= self.nbytes:
            raise CheckpointError(f"{self.path} is damaged: a tensor reaches beyond its storage {brief(self.key)}")
        with closing(RangeReader(self.path.parent, once=False)) as reader:
            return reader.read(self.path.name, self.start + first, nbytes, brief(self.key))


@lru_cache(maxsize=1)  # a tensor that is not contiguous is read in many parts
def _contents(place: _Place) -> torch.Tensor:
    return place.read(0, place.nbytes)


class _Storages:
    """Unpickles a file, and makes the storages of its tensors."""

    def __init__(self, path: Path, file: BinaryIO, archive: zipfile.ZipFile) -> None:
        self._path = path
        self._file = file
        self._archive = archive
        self._prefix = next(n for n in archive.namelist() if n.endswith("/data.pkl")).removesuffix("data.pkl")
        self._made: dict[str, torch.UntypedStorage] = {}

    def unpickled(self) -> Any:
        order = f"{self._prefix}byteorder"
        if order in self._archive.namelist() and self._archive.read(order).decode() != sys.byteorder:
            raise ValueError(f"it is of a machine with another byte order than this one's ({sys.byteorder})")
        pickled = io.BytesIO(self._archive.read(f"{self._prefix}data.pkl"))
        unpickler: Any = _weights_only_unpickler.Unpickler(pickled, encoding="utf-8")
        unpickler.persistent_load = self._storage
        content = unpickler.load()
        torch._utils._validate_loaded_sparse_tensors()  # as torch.load does
        return content

    def _storage(self, saved: Any) -> torch.storage.TypedStorage:
        """Return the storage for a persistent id, as torch's own `persistent_load` does."""
        _, kind, key, _, numel = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if key not in self._made:
            self._made[key] = self._make(key, numel * dtype.itemsize)
        return torch.storage.TypedStorage(wrap_storage=self._made[key], dtype=dtype, _internal=True)

    def _make(self, key: str, nbytes: int) -> torch.UntypedStorage:
        entry = self._archive.getinfo(f"{self._prefix}data/{key}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes:
            raise ValueError(f"its entry {brief(entry.filename)} has {entry.file_size} bytes, and {nbytes} are named")
        if nbytes <= _SMALL_BYTES:
            return torch.tensor(bytearray(self._archive.read(entry)), dtype=torch.uint8, device="cpu").untyped_storage()
        self._file.seek(entry.header_offset + _LENGTHS_AT)
        name, extra = struct.unpack("<HH", self._file.read(4))
        storage = torch.UntypedStorage(nbytes, device="meta")
        # An attribute of the storage, like torch's `_checkpoint_offset`: all tensors that share it can find it there.
        storage._place = _Place(self._path, key, entry.header_offset + _LENGTHS_AT + 4 + name + extra, nbytes)  # type: ignore[attr-defined]
        return storage


_LENGTHS_AT = 26  # offset of the lengths of the name and the extra field, in the header before an entry's bytes


def elements(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return elements `[start, stop)` of a tensor of `read_pickle`, flat. Read them if they are in the file.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    if not tensor.is_meta:
        return tensor.reshape(-1)[start:stop]
    start, stop = min(start, tensor.numel()), min(stop, tensor.numel())
    size = tensor.dtype.itemsize
    place: _Place | None = getattr(tensor.untyped_storage(), "_place", None)
    if place is None:
        raise CheckpointError(f"a tensor of shape {tuple(tensor.shape)} is on the meta device: it was saved empty")
    if tensor.is_contiguous():
        return place.read((int(tensor.storage_offset()) + start) * size, (stop - start) * size).view(tensor.dtype)
    stored = _contents(place)[: place.nbytes // size * size].view(tensor.dtype)
    return stored.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).reshape(-1)[start:stop]


def whole(value: Any) -> Any:
    """Return the value with all of its tensors read from the file. Raises as `elements`."""
    if isinstance(value, torch.Tensor):
        return elements(value, 0, value.numel()).reshape(value.shape).clone() if value.is_meta else value
    if isinstance(value, Mapping):
        return {key: whole(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(whole, value))
    return value


def _reason(error: Exception) -> str:
    """Return the line of torch's error with the reason, without its advice to run the file's code."""
    lines = [line for line in str(error).splitlines() if line.startswith(("Trying", "Unsupported", "Can only"))]
    return lines[0] if lines else f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def stranger(value: Any) -> str | None:
    """Return the name of the first class in a value that is neither a tensor nor plain; None if there is none."""
    if isinstance(value, ForeignObject):
        return value.name
    if isinstance(value, type):
        return value.__name__ if not issubclass(value, ForeignObject) else value.name
    if isinstance(value, Mapping):
        return _first(*value.keys(), *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return _first(*value)
    return None if isinstance(value, _PLAIN) else brief(type(value).__name__)


def _first(*values: Any) -> str | None:
    return next((found for value in values if (found := stranger(value)) is not None), None)
