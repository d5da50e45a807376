"""Read, check and write the manifest of a checkpoint. docs/checkpoints.md specifies the format; see also `tensors.py`.

A trainable parameter `w` is stored as `master.w`, float32, and the moments of its optimizer in the dtypes of the state
format; a frozen one as `param.w` in the compute dtype, or as `code.w` in its own if it is integers or other codes.
"""

from __future__ import annotations

import json
import math
import zlib
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.files import brief, is_file_name, parse_json, read_plain
from infinity.checkpoint.stored import StoredTensor
from infinity.checkpoint.sums import BLOCK_BYTES, decode, encode
from infinity.checkpoint.tensors import DTYPES, TensorPart
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.formats import layout_with_moments
from infinity.tiers.state_layout import StateField, StateLayout

VERSION = 3
_READ = (2, 3)  # in format 2 each tensor is whole in one file, and has one checksum
MANIFEST = "manifest.json"
EXTRA = "extra.pt"
MASTER_FIELD = "master"
FROZEN_FIELD = "param"
CODE_FIELD = "code"

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")
_MAX_COUNT = 1 << 62


class UnknownFormatError(CheckpointError):
    """The checkpoint has an unknown format version. It need not be damaged."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint, without the values.

    Attributes:
        state_format: format of the moments; see `infinity.optim.formats`.
        moments: names of the optimizer's signed moment and of the one that is never negative; each may be None.
        tensors: the stored tensors, by key `field.parameter`.
        ranks: number of ranks that saved it.
        steps: number of updates of each trainable parameter.
        counters: the engine's step counters.
        extra_crc: CRC-32 of the file with schedules, random states and the client's state.
        run: the training run that saved it; None in old checkpoints.
        model: the model's configuration and classes, see `identity.py`; None in old and imported checkpoints.
    """

    state_format: str
    moments: tuple[str | None, str | None]
    tensors: Mapping[str, StoredTensor]
    steps: Mapping[str, int]
    counters: Mapping[str, int]
    extra_crc: int
    ranks: int = 1
    run: str | None = None
    model: Mapping[str, Any] | None = None

    @property
    def layout(self) -> StateLayout:
        """The format of the moments."""
        return layout_with_moments(self.state_format, *self.moments)

    def stored(self, field: str) -> dict[str, StoredTensor]:
        """Return the tensors of a field (masters, frozen parameters, codes, or a moment), by parameter."""
        prefix = f"{field}."
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    @property
    def files(self) -> list[str]:
        """The names of the tensor files."""
        return list(dict.fromkeys(part.file for tensor in self.tensors.values() for part in tensor.parts))

    @property
    def has_whole_sums(self) -> bool:
        """Whether tensors have one checksum each, as in format 2."""
        return any(part.block_bytes != BLOCK_BYTES for tensor in self.tensors.values() for part in tensor.parts)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_bytes(self) -> bytes:
        """Return the manifest as it is stored, with its checksum."""
        content: dict[str, Any] = {
            "format": VERSION,
            "state_format": self.state_format,
            "moments": list(self.moments),
            "ranks": self.ranks,
            "counters": dict(self.counters),
            "extra_crc": self.extra_crc,
            "steps": dict(self.steps),
            "tensors": {key: _tensor_record(tensor) for key, tensor in self.tensors.items()},
        }
        content |= {key: value for key, value in (("run", self.run), ("model", self.model)) if value is not None}
        content["crc"] = _checksum(content)
        return json.dumps(content, indent=1).encode()


def _tensor_record(tensor: StoredTensor) -> dict[str, Any]:
    parts = [
        {"file": part.file, "start": part.start, "numel": part.numel, "sums": encode(part.sums)}
        for part in tensor.parts
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "parts": parts}


def stored_fields(layout: StateLayout) -> tuple[StateField, ...]:
    """Return the fields that are stored for a trainable parameter: the float32 master, and the format's moments."""
    return (StateField(MASTER_FIELD, torch.float32), *layout.moment_fields)


def stored_shape(field: StateField, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor of `field` for a parameter of this shape. Scales of blocks are flat."""
    return shape if field.block == 1 else (field.length(torch.Size(shape).numel()),)


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of an unknown format version.
    """
    return parse_manifest(directory, read_manifest_bytes(directory))


def read_manifest_bytes(directory: Path) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    try:
        return read_plain(directory / MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {directory} is no checkpoint{_of_another_library(directory)}") from error


def _of_another_library(directory: Path) -> str:
    """Return the end of a message: how to import the checkpoint, if it is one of another library."""
    for pattern, name in (("*_model_states.pt", "DeepSpeed"), (".metadata", "torch.distributed.checkpoint")):
        with suppress(OSError):  # the caller raises the error of the manifest
            if any(directory.glob(pattern)):
                return f" of this library, but one of {name}: `infinity checkpoint import` makes it one"
    return ""


def parse_manifest(directory: Path, stored: bytes) -> Manifest:
    """Parse and check the bytes of a manifest.

    Raises:
        CheckpointError: the manifest is damaged, or of an unknown format version.
    """
    path = directory / MANIFEST
    try:
        content = parse_json(stored)
        version = content["format"]
        if version not in _READ:
            raise UnknownFormatError(
                f"{path} has format {brief(version)}; this version of infinity reads formats "
                f"{' and '.join(map(str, _READ))}: load it with the version that saved it"
            )
        if content.pop("crc") != _checksum(content):
            raise ValueError("its checksum differs from its content")
        return _parse(content)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def check_replaceable(path: Path) -> None:
    """Check that a new checkpoint at `path` would replace an older one, or nothing.

    Raises:
        CheckpointError: `path` is something else, which must not be lost.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a symbolic link" if path.is_symlink() else "no directory"
        raise CheckpointError(f"{path} is {kind}, which a checkpoint cannot replace: remove it, or choose another tag")
    if path.is_dir() and not (path / MANIFEST).exists() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} is a directory without {MANIFEST}, so no checkpoint, and would be lost: remove it, or choose "
            "another tag"
        )


def _checksum(content: Mapping[str, Any]) -> int:
    """Return the CRC-32 of the canonical JSON of all keys but the checksum."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _parse(content: Mapping[str, Any]) -> Manifest:
    counters = {name: _count(content["counters"][name]) for name in _COUNTERS}
    first, second = content["moments"]
    read = _whole_tensor if content["format"] == 2 else _tensor
    manifest = Manifest(
        state_format=str(content["state_format"]),
        moments=(first, second),
        tensors={key: read(values) for key, values in content["tensors"].items()},
        steps={name: _count(step) for name, step in content["steps"].items()},
        counters=counters,
        extra_crc=_count(content["extra_crc"]),
        ranks=_count(content.get("ranks", 1)),
        run=content.get("run"),
        model=content.get("model"),
    )
    if not isinstance(manifest.run, str | None) or not isinstance(manifest.model, dict | None):
        raise ValueError("`run` is no name or `model` is no object")
    _check_complete(manifest)
    return manifest


def _check_complete(manifest: Manifest) -> None:
    """Check that every trained parameter has all fields of the state format, and that no other tensors exist."""
    try:
        fields = stored_fields(manifest.layout)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    left = {key for key in manifest.tensors if not key.startswith((f"{FROZEN_FIELD}.", f"{CODE_FIELD}."))}
    for name, master in manifest.stored(MASTER_FIELD).items():
        for field in fields:
            entry = manifest.tensors.get(f"{field.name}.{name}")
            expected = stored_shape(field, master.shape)
            if entry is None or entry.torch_dtype != field.dtype or entry.shape != expected:
                raise ValueError(f"format {manifest.state_format} needs {field.name}.{name}, {field.dtype} {expected}")
            left.remove(f"{field.name}.{name}")
    if left:
        raise ValueError(f"tensor {min(left)} belongs to no parameter in format {manifest.state_format}")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{brief(value)} is no count")
    return value


def _tensor(values: Mapping[str, Any]) -> StoredTensor:
    tensor = StoredTensor(str(values["dtype"]), _shape(values), tuple(_part(part) for part in values["parts"]))
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{brief(tensor.dtype)} is no dtype")
    if sum(part.numel for part in tensor.parts) != tensor.numel:
        raise ValueError(f"its parts do not make a tensor of shape {tensor.shape}")
    for part in tensor.parts:
        if len(part.sums) != -(-part.numel * tensor.torch_dtype.itemsize // BLOCK_BYTES):
            raise ValueError(f"{part.numel} elements of {tensor.dtype} in {part.file} have {len(part.sums)} checksums")
    return tensor


def _part(values: Mapping[str, Any]) -> TensorPart:
    sums = decode(values["sums"])
    return TensorPart(_file(values), _count(values["start"]), _count(values["numel"]), sums)


def _whole_tensor(values: Mapping[str, Any]) -> StoredTensor:
    """Parse a tensor of format 2."""
    dtype, shape, nbytes = str(values["dtype"]), _shape(values), _count(values["nbytes"])
    if dtype not in DTYPES or math.prod(shape) * DTYPES[dtype].itemsize != nbytes:
        raise ValueError(f"{nbytes} bytes are no {dtype} tensor of shape {shape}")
    sums = array("I", [_count(values["crc"])])
    part = TensorPart(_file(values), _count(values["start"]), math.prod(shape), sums, max(nbytes, 1))
    return StoredTensor(dtype, shape, (part,))


def _shape(values: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(_count(size) for size in values["shape"])


def _file(values: Mapping[str, Any]) -> str:
    name = str(values["file"])
    if not is_file_name(name) or not name.endswith(".safetensors"):
        raise ValueError(f"file name {name!r} leaves the checkpoint, or is none of tensors")
    return name
