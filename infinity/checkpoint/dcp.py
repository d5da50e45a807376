"""Export and import checkpoints of `torch.distributed.checkpoint`, for any number of ranks.

The keys are those of torch's `get_state_dict`: `model.<name>` are masters, frozen parameters and buffers,
`optim.state.<name>.exp_avg` and so on the moments, `optim.state.<name>.step` the number of updates, and
`optim.param_groups` the hyper-parameters. The rest of the engine's state is one tensor of bytes, `infinity.extra`. Both
directions keep one tensor at a time in memory.
"""

from __future__ import annotations

import inspect
import io
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from infinity.checkpoint.conversion import Progress
from infinity.checkpoint.directory import check_tag, make_directory, writing
from infinity.checkpoint.extra import read_extra, unpacked
from infinity.checkpoint.files import is_file_name, open_plain, read_plain
from infinity.checkpoint.format import CODE_FIELD, EXTRA, FROZEN_FIELD, MASTER_FIELD, Manifest
from infinity.checkpoint.imported import (
    KINDS,
    Foreign,
    ForeignParam,
    named_as_damaged,
    plain_extra,
    unknown_kind,
    write_imported,
)
from infinity.checkpoint.inspection import verify
from infinity.checkpoint.pickles import check_sums, stranger
from infinity.checkpoint.stored import StoredReader
from infinity.errors import CheckpointError
from infinity.optim.formats import layout_with_moments
from infinity.zero.model_parts import is_code

METADATA = ".metadata"
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
_EXTRA = "infinity.extra"
_NOTES = "infinity.notes"
_STEP = "step"
_CORRECTED = frozenset({"exp_avg_sq", "sum"})  # moments whose meaning depends on the number of updates
_STATE = re.compile(r"(?P<prefix>(?:.*?\.)?state\.)(?P<name>.+)\.(?P<field>\w+)")


# Export #


def export_dcp(source: Path, target: Path, *, tag: str | None = None) -> Path:
    """Write a checkpoint of the engine as one of `torch.distributed.checkpoint`, in float32.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, its moments are rounded, or `target` is not empty.
        StorageError: writing failed.
        ConfigError: `tag` is no plain name.
    """
    path, manifest = verify(source, tag)
    if manifest.layout.moment_fields != layout_with_moments("fp32", *manifest.moments).moment_fields:
        raise CheckpointError(
            f"{path} has moments of format {manifest.state_format}: convert them to float32 first, with "
            "`infinity checkpoint reshard --state-format fp32`"
        )
    if target.is_dir() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: remove what is there, or export elsewhere")
    extra = read_extra(path, manifest)
    with writing(target), StoredReader(path, manifest.tensors) as reader:
        make_directory(target)
        content = _Content(manifest, extra, read_plain(path / EXTRA), reader)
        writer = FileSystemWriter(target, thread_count=1)
        with _alone() as alone:
            save(content.state_dict(), storage_writer=writer, planner=_SavePlanner(content), **alone)
    return target


class _Content:
    """The exported entries, by key. Tensors have no values until they are written."""

    def __init__(self, manifest: Manifest, extra: Mapping[str, Any], stored: bytes, reader: StoredReader) -> None:
        self._manifest = manifest
        self._groups = extra["optimizer"]["param_groups"] or []
        self._reader = reader
        self._stored: dict[str, str] = {}  # the checkpoint's key of each tensor that is in its files
        self._values: dict[str, torch.Tensor] = {
            f"model.{name}": value.contiguous() for name, value in extra["buffers"].items()
        }
        notes = {"counters": dict(manifest.counters), "buffers": sorted(extra["buffers"])}
        self._values[_NOTES] = _bytes_of(json.dumps(notes).encode())
        self._values[_EXTRA] = _bytes_of(stored)
        for kind in (FROZEN_FIELD, CODE_FIELD, MASTER_FIELD):
            self._stored |= {f"model.{name}": f"{kind}.{name}" for name in manifest.stored(kind)}
        for name in manifest.stored(MASTER_FIELD):
            for field in manifest.layout.moment_fields:
                self._stored[f"optim.state.{name}.{field.name}"] = f"{field.name}.{name}"
            self._values[f"optim.state.{name}.{_STEP}"] = torch.tensor(float(manifest.steps.get(name, 0)), device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return the entries by key. Tensors that are in files are on the meta device."""
        names = list(self._manifest.stored(MASTER_FIELD))
        members = names if len(self._groups) == 1 else []  # a checkpoint does not store which group a parameter is in
        groups = [dict(group) | {"params": members} for group in self._groups]
        in_files = {
            key: torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="meta")
            for key, tensor in ((key, self._manifest.tensors[stored]) for key, stored in self._stored.items())
        }
        return in_files | self._values | {"optim.param_groups": groups}

    def value(self, key: str) -> torch.Tensor | None:
        """Read a tensor that is in files; None for any other key."""
        stored = self._stored.get(key)
        return None if stored is None else self._reader.whole(stored)


class _SavePlanner(DefaultSavePlanner):
    """Reads each tensor when torch writes it."""

    def __init__(self, content: _Content) -> None:
        super().__init__(flatten_state_dict=False)
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self._content.value(index.fqn)
        return super().lookup_object(index) if value is None else value


@contextmanager
def _alone() -> Iterator[dict[str, Any]]:
    """Let torch save or load in this process alone. Its CheckpointException is replaced by the error that it holds.

    Yields:
        Keyword arguments for torch's `save` and `load`.

    Raises:
        CheckpointError: a process group is initialized, and this version of torch needs all of its ranks.
    """
    if dist.is_initialized() and "no_dist" not in inspect.signature(save).parameters:
        raise CheckpointError(
            f"torch {torch.__version__} converts torch.distributed.checkpoint directories on all ranks together: "
            "do it in a process without ranks (infinity checkpoint import, export), or take a newer torch"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled, )?unavailable or uninitialized")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # older versions of torch use it themselves
        try:
            yield {"no_dist": True} if dist.is_initialized() else {}
        except CheckpointException as error:  # not a subclass of Exception; holds the error of each rank
            raise next(iter(error.failures.values()))[0] from None


def _bytes_of(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# Import #


def import_dcp(
    source: Path, target: Path, *, tag: str | None = None, progress: Progress = lambda done, total: None
) -> Path:
    """Convert a checkpoint of `torch.distributed.checkpoint`, with its optimizer states, to one of the engine.

    Args:
        source: the directory with `.metadata`; or, if `tag` is given, the parent of a directory `tag` with it.

    Returns:
        The new checkpoint's directory, in `target`.

    Raises:
        CheckpointError: the checkpoint is damaged, has no optimizer states, or those of an unsupported optimizer.
        StorageError: writing failed.
    """
    if tag is not None:
        check_tag(tag)
        source = source / tag
    if target.resolve() in (source.resolve(), source.resolve().parent):
        raise CheckpointError(f"{target} has the checkpoint that is imported in it: give the new one another directory")
    with named_as_damaged(source / METADATA):
        return write_imported(target, _Incoming(source).foreign(), progress)


class _Reader(FileSystemReader):
    """Reads the metadata with `_read_metadata`: torch's reader would unpickle them and run code that they name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.content = _read_metadata(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.content


class _Plain(pickle._Unpickler):  # in Python, so that an opcode can be replaced
    """Unpickles the classes that metadata consist of, and refuses all others."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _build(self) -> None:
        """Set the fields of a dataclass instance. A class or an Enum member would be changed for the whole process."""
        made, state = self.stack[-2], self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, type) or not is_dataclass(made):
            raise pickle.UnpicklingError(f"it sets attributes of {made!r}, which is no part of such metadata")
        own = "__setstate__" in type(made).__dict__  # as TensorProperties has, whose state is no dict of fields
        for half in state if isinstance(state, tuple) and len(state) == 2 and not own else (state,):
            named = isinstance(half, dict) and half.keys() <= {field.name for field in fields(made)}
            if half is not None and not named and not own:
                raise pickle.UnpicklingError(f"it sets other attributes of {type(made).__name__} than its fields")
        self.load_build()  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        kinds = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if module in kinds and name in _METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("torch", "Size") or (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if (module, name) in (("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("pathlib", "PurePosixPath")):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle members of an Enum with it
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of such metadata")


def _member(kind: Any, name: str) -> Enum:
    """Return the member of an Enum. Refuse any other object, and any other attribute."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it asks for {name!r} of {kind!r}, which is no part of such metadata")
    return kind[name]


_METADATA_CLASSES = frozenset(
    {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
        "_StorageInfo",
    }
)


def _read_metadata(path: Path) -> Metadata:
    try:
        content = _Plain(io.BytesIO(read_plain(path / METADATA))).load()
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {path} is no checkpoint of torch.distributed.checkpoint") from error
    except Exception as error:  # damaged content can raise any exception
        raise CheckpointError(f"{path / METADATA} cannot be read: {error}") from error
    if not isinstance(content, Metadata) or not isinstance(content.storage_data, dict):
        raise CheckpointError(f"{path / METADATA} has no metadata of a checkpoint in files")
    for info in content.storage_data.values():
        if not is_file_name(info.relative_path):
            raise CheckpointError(f"{path / METADATA} names {info.relative_path!r}, which is no file in its directory")
    for key, found in content.state_dict_metadata.items():
        if isinstance(found, TensorStorageMetadata):
            _check_covered(path, key, found)
    content.storage_meta = content.storage_meta or StorageMeta()
    return content


def _check_covered(path: Path, key: str, found: TensorStorageMetadata) -> None:
    """Refuse chunks that do not cover the tensor: elements in no chunk would be imported as uninitialized memory."""
    size = tuple(found.size)
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in found.chunks]
    within = all(
        len(offsets) == len(sizes) == len(size)
        and all(
            offset >= 0 and length >= 0 and offset + length <= whole
            for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        for offsets, sizes in boxes
    )
    if not within or not _tile(boxes, (0,) * len(size), size):
        raise CheckpointError(f"{path / METADATA} is damaged: the chunks of {key} do not cover it exactly once")


def _tile(boxes: Sequence[_Box], start: tuple[int, ...], size: tuple[int, ...], axis: int = 0) -> bool:
    """Whether the boxes (offsets, sizes) fill the given one exactly, in slabs along each axis, as ranks divide it."""
    if 0 in size:
        return True
    boxes = [box for box in boxes if 0 not in box[1]]
    if axis == len(size):
        return len(boxes) == 1
    at, end = start[axis], start[axis] + size[axis]
    slabs: dict[tuple[int, int], list[_Box]] = {}
    for box in boxes:
        slabs.setdefault((box[0][axis], box[1][axis]), []).append(box)
    for (offset, length), slab in sorted(slabs.items()):
        if offset != at or not _tile(slab, start, size, axis + 1):
            return False
        at += length
    return at == end


def _check_entry(path: Path, key: str, info: _StorageInfo) -> None:
    """Refuse an entry that differs from its checksums: torch's reader does not check them."""
    file = path / info.relative_path
    with open_plain(file) as opened:
        opened.seek(info.offset)
        content = opened.read(info.length)
    try:
        if len(content) < info.length:
            raise zipfile.BadZipFile(f"it has {len(content)} bytes of {info.length}")
        check_sums(zipfile.ZipFile(io.BytesIO(content)))
    except Exception as error:  # bytes that are no archive make zipfile raise various exceptions
        raise CheckpointError(
            f"{file} is damaged, or {path / METADATA} is: {key} is not at byte {info.offset} ({error})"
        ) from error


class _LoadPlanner(DefaultLoadPlanner):
    """Reads objects without running code that the file names."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint, read when it is needed. One tensor at a time is in memory."""

    incoming: _Incoming
    key: str

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `imported.Values`."""
        return self.incoming.tensor(self.key).reshape(-1)[start:stop]


class _Incoming:
    """The checkpoint that is imported."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = _Reader(path)
        self._metadata = self._reader.content.state_dict_metadata
        self._entries: dict[str, list[_StorageInfo]] = {}
        for index, info in self._reader.content.storage_data.items():
            self._entries.setdefault(index.fqn, []).append(info)
        self._held: tuple[str, torch.Tensor] = ("", torch.empty(0, device="cpu"))

    def tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor. The last one is kept in memory."""
        if self._held[0] != key:
            found = self._metadata[key]
            assert isinstance(found, TensorStorageMetadata)
            self._held = key, self._load(key, torch.empty(found.size, dtype=found.properties.dtype, device="cpu"))
        return self._held[1]

    def _load(self, key: str, into: Any) -> Any:
        state = {key: into}
        try:
            for info in self._entries.get(key, ()):
                _check_entry(self._path, key, info)
            with _alone() as alone:
                load(state, storage_reader=self._reader, planner=_LoadPlanner(), **alone)
        except CheckpointError:
            raise
        except Exception as error:  # foreign files can make torch raise any exception
            names = {info.relative_path for info in self._entries.get(key, ())}
            files = ", ".join(str(self._path / name) for name in sorted(names)) or self._path / METADATA
            raise CheckpointError(f"{files} cannot be read as {self._path / METADATA} says: {key}: {error}") from error
        return state[key]

    def foreign(self) -> Foreign:
        """Return the content of the checkpoint."""
        prefix, states = self._states()
        before = self._model_prefix(set(states), prefix)
        kinds = {frozenset(fields - {_STEP}) for fields in states.values()}
        if len(kinds) != 1 or next(iter(kinds)) not in KINDS:
            raise unknown_kind(self._path / METADATA, kinds)
        notes = json.loads(bytes(self.tensor(_NOTES).tolist())) if _NOTES in self._metadata else {}
        buffers = set(notes.get("buffers", ()))
        params = list(self._params(prefix, before, states, buffers))
        steps = max((param.step for param in params), default=0)
        counters = notes.get("counters") or {"global_steps": steps, "micro_steps": steps, "skipped_steps": 0}
        name = self._path.resolve().name if "counters" not in notes else f"global_step{counters['global_steps']}"
        return Foreign(name, params, KINDS[kinds.pop()], counters, self._extra(prefix))

    def _states(self) -> tuple[str, dict[str, set[str]]]:
        """Return the prefix of parameter names in the optimizer's keys, and the fields of each parameter."""
        prefixes: set[str] = set()
        states: dict[str, set[str]] = {}
        for key, found in self._metadata.items():
            match = _STATE.fullmatch(key)
            if match is not None and (isinstance(found, TensorStorageMetadata) or match["field"] == _STEP):
                prefixes.add(match["prefix"])
                states.setdefault(match["name"], set()).add(match["field"])
        if len(prefixes) != 1:
            raise CheckpointError(
                f"{self._path / METADATA} has no states of an optimizer (`optim.state.<name>.exp_avg`), or of several. "
                "Weights alone are taken by torch.distributed.checkpoint and load_state_dict before initialize"
            )
        return prefixes.pop(), states

    def _model_prefix(self, names: set[str], states: str) -> str:
        """Return the prefix of parameter names in the model's keys."""
        first = min(names)
        ends = (key.removesuffix(first) for key in sorted(self._metadata) if key.endswith(first))
        for prefix in ends:
            of_model = not prefix.startswith(states) and (not prefix or prefix.endswith("."))
            if of_model and all(f"{prefix}{name}" in self._metadata for name in names):
                return prefix
        raise CheckpointError(
            f"{self._path / METADATA} has optimizer states of {first} and others, but not these parameters"
        )

    def _params(
        self, prefix: str, before: str, states: Mapping[str, set[str]], buffers: set[str]
    ) -> Iterator[ForeignParam]:
        for key, found in self._metadata.items():
            name = key.removeprefix(before)
            outside = not key.startswith(before) or key.startswith((prefix, "infinity.")) or name in buffers
            if outside or not isinstance(found, TensorStorageMetadata):
                continue
            shape = tuple(found.size)
            if name not in states:
                if is_code(found.properties.dtype):
                    yield ForeignParam(name, shape, _Stored(self, key), dtype=found.properties.dtype)
                elif not self._is_tied(key, [f"{before}{other}" for other in states]):
                    yield ForeignParam(name, shape, _Stored(self, key))
                continue
            moments = {}
            for field in sorted(states[name] - {_STEP}):
                state = self._metadata[f"{prefix}{name}.{field}"]
                if not isinstance(state, TensorStorageMetadata) or tuple(state.size) != shape:
                    raise CheckpointError(
                        f"{self._path / METADATA}: {field} of {name} has another shape than its parameter"
                    )
                moments[field] = _Stored(self, f"{prefix}{name}.{field}")
            if _STEP not in states[name] and not moments.keys().isdisjoint(_CORRECTED):
                raise CheckpointError(
                    f"{self._path / METADATA} has moments of {name} and no `step`: how many updates they are of is not "
                    "known, and Adam and Adagrad divide by it"
                )
            yield ForeignParam(name, shape, _Stored(self, key), moments, self._step(f"{prefix}{name}.{_STEP}"))

    def _is_tied(self, key: str, trained: Sequence[str]) -> bool:
        """Whether a tensor without states has the values of a trained parameter, so that it is a tied name of it."""
        found = self._metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        for other in trained:
            there = self._metadata[other]
            if isinstance(there, TensorStorageMetadata) and there.size == found.size and found.size.numel() > 1:
                values = self.tensor(other)
                if torch.equal(values, self.tensor(key)):
                    return True
        return False

    def _step(self, key: str) -> int:
        found = self._metadata.get(key)
        if found is None:
            return 0
        if isinstance(found, BytesStorageMetadata):
            return int(self._load(key, None))
        return int(self.tensor(key).item())

    def _extra(self, prefix: str) -> dict[str, Any]:
        """Return the content of `extra.pt`: the engine's own if it wrote the checkpoint, else the parameter groups."""
        if _EXTRA in self._metadata:
            return unpacked(self.tensor(_EXTRA).numpy().tobytes(), f"{_EXTRA} of {self._path / METADATA}")
        key = f"{prefix.removesuffix('state.')}param_groups"
        groups = self._load(key, None) if isinstance(self._metadata.get(key), BytesStorageMetadata) else []
        kept = [
            {name: value for name, value in group.items() if name != "params" and stranger(value) is None}
            for group in groups
        ]
        return plain_extra(groups=kept)
