"""Inspect, verify and export a checkpoint on disk, without a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.conversion import checkpoint_at
from infinity.checkpoint.directory import latest_tag, tags
from infinity.checkpoint.export import specs_of, write_model
from infinity.checkpoint.extra import read_extra
from infinity.checkpoint.format import (
    CODE_FIELD,
    EXTRA,
    FROZEN_FIELD,
    MANIFEST,
    MASTER_FIELD,
    Manifest,
    read_manifest,
)
from infinity.checkpoint.stored import Progress, StoredReader, check_files
from infinity.errors import CheckpointError

_SHARD_BYTES = 5_000_000_000
_COMPUTED_IN = {"fp32": torch.float32, "master": torch.float16}  # by state format; bfloat16 for all others


@dataclass(frozen=True)
class Inspection:
    """A summary of a manifest and of the directory around it.

    Attributes:
        trained_parameters, frozen_parameters: numbers of elements.
        nbytes: bytes of all tensors.
        missing: files that the manifest names and the directory lacks.
        tags: all directories beside it that have a manifest, and itself.
        latest: the tag that is loaded by default from the directory that it is in.
    """

    path: str
    run: str | None
    global_steps: int
    state_format: str
    moments: tuple[str | None, str | None]
    ranks: int
    trained_parameters: int
    frozen_parameters: int
    tensors: int
    files: int
    nbytes: int
    missing: tuple[str, ...]
    tags: tuple[str, ...]
    latest: str | None


def inspect(source: Path, tag: str | None = None) -> Inspection:
    """Read the manifest of a checkpoint, and no tensor.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.
        ConfigError: `tag` is no plain name.
    """
    path = checkpoint_at(source, tag)
    manifest = read_manifest(path)
    return Inspection(
        path=str(path),
        run=manifest.run,
        global_steps=manifest.counters["global_steps"],
        state_format=manifest.state_format,
        moments=manifest.moments,
        ranks=manifest.ranks,
        trained_parameters=_elements(manifest, MASTER_FIELD),
        frozen_parameters=_elements(manifest, FROZEN_FIELD),
        tensors=len(manifest.tensors),
        files=len(manifest.files),
        nbytes=manifest.nbytes,
        missing=tuple(name for name in (*manifest.files, EXTRA) if not (path / name).is_file()),
        tags=tuple(name for name in tags(path.parent) if (path.parent / name / MANIFEST).is_file()),
        latest=latest_tag(path.parent),
    )


def verify(source: Path, tag: str | None = None, progress: Progress = lambda nbytes: None) -> tuple[Path, Manifest]:
    """Read a whole checkpoint, and compare it with its manifest.

    Returns:
        Its path and its manifest. A moment later, the last checkpoint of `source` may be another one.

    Raises:
        CheckpointError: the checkpoint is missing or damaged. The message names the file and the tensor.
        ConfigError: `tag` is no plain name.
    """
    path = checkpoint_at(source, tag)
    manifest = read_manifest(path)
    check_files(path, manifest.tensors, progress)
    read_extra(path, manifest)
    return path, manifest


def client_state(source: Path, tag: str | None = None) -> dict[str, Any]:
    """Return the `client_state` that the training loop saved with the checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: `tag` is no plain name.
    """
    path = checkpoint_at(source, tag)
    state = read_extra(path, read_manifest(path))["client_state"]
    return state if isinstance(state, dict) else {}


def trained_values(source: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """Return the float32 masters of the trained parameters, all in memory. Meant for adapters, which are small.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: `tag` is no plain name.
    """
    path, manifest = verify(source, tag)
    with StoredReader(path, manifest.tensors) as reader:
        return {name: reader.whole(f"{MASTER_FIELD}.{name}") for name in manifest.stored(MASTER_FIELD)}


def export_weights(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    tag: str | None = None,
    model: nn.Module | None = None,
) -> Path:
    """Write weights, codes and persistent buffers of a checkpoint as safetensors, one parameter in memory at a time.

    Args:
        dtype: dtype of the weights; by default the one that the training computed in.
        model: a transformers model, on any device. Its configuration is written as well, so that transformers can load
            the directory; a checkpoint has none.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or is not of `model`.
        StorageError: writing failed.
        ConfigError: `tag` is no plain name.
    """
    path, manifest = verify(source, tag)
    buffers: dict[str, torch.Tensor] = read_extra(path, manifest)["buffers"]
    coded = manifest.stored(CODE_FIELD)
    keys = {name: f"{field}.{name}" for field in (MASTER_FIELD, FROZEN_FIELD) for name in manifest.stored(field)}
    if not keys:
        raise CheckpointError(f"{path} has no weights")
    if model is not None:
        _check_names(path, keys, model)
    dtype = _COMPUTED_IN.get(manifest.state_format, torch.bfloat16) if dtype is None else dtype
    specs = {name: (dtype, manifest.tensors[key].shape) for name, key in keys.items()}
    specs |= {name: (stored.torch_dtype, stored.shape) for name, stored in coded.items()}
    specs |= specs_of(buffers, dtype)
    keys |= {name: f"{CODE_FIELD}.{name}" for name in coded}

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        with StoredReader(path, manifest.tensors) as reader:
            for name, key in keys.items():
                yield name, reader.whole(key)
        yield from buffers.items()

    write_model(target, model or nn.Module(), values(), specs, dtype=dtype, shard_bytes=_SHARD_BYTES)
    return target


def _check_names(path: Path, stored: Collection[str], model: nn.Module) -> None:
    """Check that the checkpoint has the model's parameters, and no others."""
    named = {name for name, _ in model.named_parameters()}
    kind, stored = type(model).__name__, set(stored)
    problems = [f"it has no parameter `{name}`, which {kind} has" for name in sorted(named - stored)]
    problems += [f"it has a parameter `{name}`, which {kind} does not have" for name in sorted(stored - named)]
    if problems:
        raise CheckpointError(f"{path} is the checkpoint of another model ({len(problems)} differences): {problems[0]}")


def _elements(manifest: Manifest, field: str) -> int:
    return sum(tensor.numel for tensor in manifest.stored(field).values())
