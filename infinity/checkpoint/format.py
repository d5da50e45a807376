"""What a checkpoint says of itself. docs/checkpoints.md is the specification; this and `tensors.py` are its code.

A trainable parameter `w` has `master.w`, float32, and the moments of its optimizer in the dtypes of the state format;
a frozen one has `param.w` in the compute dtype.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.tensors import DTYPES, TensorEntry, write_file
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.formats import StateField, StateLayout, layout_with_moments

VERSION = 2
MANIFEST = "manifest.json"
EXTRA = "extra.pt"
MASTER = StateField("master", torch.float32)
FROZEN_FIELD = "param"

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        state_format: format of the moments; see `infinity.optim.formats`.
        moments: names of the optimizer's signed moment and of the one that is never negative, each may be None.
        tensors: by key, `field.parameter`.
        steps: updates that each trainable parameter has had.
        counters: the engine's step counters.
        extra_crc: CRC-32 of the file with schedules, random states and the client's state.
    """

    state_format: str
    moments: tuple[str | None, str | None]
    tensors: Mapping[str, TensorEntry]
    steps: Mapping[str, int]
    counters: Mapping[str, int]
    extra_crc: int

    @property
    def layout(self) -> StateLayout:
        """How the moments are kept."""
        return layout_with_moments(self.state_format, *self.moments)

    def write(self, directory: Path) -> None:
        content: dict[str, Any] = {
            "format": VERSION,
            "state_format": self.state_format,
            "moments": list(self.moments),
            "counters": dict(self.counters),
            "extra_crc": self.extra_crc,
            "steps": dict(self.steps),
            "tensors": {key: asdict(entry) for key, entry in self.tensors.items()},
        }
        content["crc"] = _checksum(content)
        write_file(directory / MANIFEST, json.dumps(content, indent=1).encode())


def stored_fields(layout: StateLayout) -> tuple[StateField, ...]:
    """The tensors of a trainable parameter: the master whole, and the moments as the format keeps them."""
    return (MASTER, *layout.moment_fields)


def stored_shape(field: StateField, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor of `field` for a parameter of this shape; scales of blocks are flat."""
    return shape if field.block == 1 else (field.length(torch.Size(shape).numel()),)


def trained_params(tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Shape of every trained parameter, by name."""
    prefix = f"{MASTER.name}."
    return {key.removeprefix(prefix): entry.shape for key, entry in tensors.items() if key.startswith(prefix)}


def frozen_params(tensors: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """Shape of every frozen parameter, by name."""
    prefix = f"{FROZEN_FIELD}."
    return {key.removeprefix(prefix): entry.shape for key, entry in tensors.items() if key.startswith(prefix)}


def read_manifest(directory: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of a format that this version does not know.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        version = content["format"]
        if version != VERSION:
            raise CheckpointError(
                f"{path} has format {version!r}; this version of infinity reads format {VERSION}: "
                "load it with the version that saved it"
            )
        if content.pop("crc") != _checksum(content):
            raise ValueError("its checksum differs from its content")
        return _parse(content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): {directory} is no checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _checksum(content: Mapping[str, Any]) -> int:
    """CRC-32 of the canonical JSON of everything but the checksum itself."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _parse(content: Mapping[str, Any]) -> Manifest:
    counters = {name: _count(content["counters"][name]) for name in _COUNTERS}
    first, second = content["moments"]
    manifest = Manifest(
        state_format=str(content["state_format"]),
        moments=(first, second),
        tensors={key: _entry(values) for key, values in content["tensors"].items()},
        steps={name: _count(step) for name, step in content["steps"].items()},
        counters=counters,
        extra_crc=_count(content["extra_crc"]),
    )
    _check_complete(manifest)
    return manifest


def _check_complete(manifest: Manifest) -> None:
    """Every trained parameter has all fields of the state format in their dtypes and shapes, and none is left over."""
    try:
        fields = stored_fields(manifest.layout)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    left = {key for key in manifest.tensors if not key.startswith(f"{FROZEN_FIELD}.")}
    for name, shape in trained_params(manifest.tensors).items():
        for field in fields:
            entry = manifest.tensors.get(f"{field.name}.{name}")
            expected = stored_shape(field, shape)
            if entry is None or entry.torch_dtype != field.dtype or entry.shape != expected:
                raise ValueError(f"format {manifest.state_format} needs {field.name}.{name}, {field.dtype} {expected}")
            left.remove(f"{field.name}.{name}")
    if left:
        raise ValueError(f"tensor {min(left)} belongs to no parameter in format {manifest.state_format}")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _entry(values: Mapping[str, Any]) -> TensorEntry:
    entry = TensorEntry(
        file=str(values["file"]),
        dtype=str(values["dtype"]),
        shape=tuple(_count(size) for size in values["shape"]),
        start=_count(values["start"]),
        nbytes=_count(values["nbytes"]),
        crc=_count(values["crc"]),
    )
    if Path(entry.file).name != entry.file:
        raise ValueError(f"file name {entry.file!r} leaves the checkpoint")
    numel = 1
    for size in entry.shape:
        numel *= size
    if entry.dtype not in DTYPES or numel * entry.torch_dtype.itemsize != entry.nbytes:
        raise ValueError(f"{entry.nbytes} bytes are no {entry.dtype} tensor of shape {entry.shape}")
    return entry
