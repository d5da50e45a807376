"""Write a checkpoint of another library in the engine's format, as one rank would write it, in bounded memory."""

from __future__ import annotations

import math
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.conversion import Progress
from infinity.checkpoint.directory import replacing
from infinity.checkpoint.files import write_file
from infinity.checkpoint.format import (
    CODE_FIELD,
    EXTRA,
    FROZEN_FIELD,
    MANIFEST,
    MASTER_FIELD,
    Manifest,
    check_replaceable,
)
from infinity.checkpoint.pickles import elements
from infinity.checkpoint.save import serialise
from infinity.checkpoint.stored import StoredTensor, write_whole
from infinity.errors import CheckpointError, InfinityError
from infinity.optim.formats import MOMENTS, layout_with_moments
from infinity.zero.model_parts import is_code

_CHUNK = 1 << 20  # elements that are in memory at once
_FILE_BYTES = 1 << 30  # a file of this size is followed by another one
_FORMAT = "fp32"  # stores everything exactly
# (signed moment, moment that is never negative) of each optimizer, by the set of their names.
KINDS = {frozenset(name for name in pair if name is not None): pair for pair in MOMENTS.values()}


class Values(Protocol):
    """The elements of one tensor, in memory or in a file."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of the flat tensor.

        Raises:
            CheckpointError: they cannot be read.
        """


@dataclass(frozen=True)
class Pieces:
    """Values that are the concatenation of tensors, which may be tensors of `read_pickle` that stay in the file."""

    tensors: tuple[torch.Tensor, ...]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Values`."""
        found, first = [], 0
        for tensor in self.tensors:
            low, high = max(start - first, 0), min(stop - first, tensor.numel())
            if low < high:
                found.append(elements(tensor, low, high))
            first += tensor.numel()
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, device="cpu")


class Zeros:
    """Moments before the first update."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """See `Values`."""
        return torch.zeros(stop - start, device="cpu")


@dataclass(frozen=True)
class ForeignParam:
    """A parameter of the imported checkpoint.

    Attributes:
        values: the values; of the master if it is trained.
        moments: the moments by name; None if it is frozen.
        step: number of updates.
        dtype: the dtype in which it is stored: float32, unless it is integers or other codes.
    """

    name: str
    shape: tuple[int, ...]
    values: Values
    moments: Mapping[str, Values] | None = None
    step: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tensors(self) -> dict[str, Values]:
        """Return the tensors that are stored for the parameter, by key."""
        if is_code(self.dtype):
            return {f"{CODE_FIELD}.{self.name}": self.values}
        if self.moments is None:
            return {f"{FROZEN_FIELD}.{self.name}": self.values}
        return {f"{MASTER_FIELD}.{self.name}": self.values} | {
            f"{moment}.{self.name}": values for moment, values in self.moments.items()
        }


@dataclass(frozen=True)
class Foreign:
    """The content of another library's checkpoint.

    Attributes:
        tag: tag of the new checkpoint.
        moments: the two moments of its optimizer, as in a manifest.
        counters: `global_steps`, `micro_steps` and `skipped_steps`.
        extra: the content of `extra.pt`.
        notes: a sentence about each value that was left out.
    """

    tag: str
    params: Sequence[ForeignParam]
    moments: tuple[str | None, str | None]
    counters: Mapping[str, int]
    extra: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def plain_extra(
    *,
    groups: Sequence[Mapping[str, Any]],
    lr_scheduler: Mapping[str, Any] | None = None,
    loss_scale: Mapping[str, float] | None = None,
    buffers: Mapping[str, torch.Tensor] | None = None,
    client_state: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `extra.pt` without random states: a run that loads it keeps its own."""
    before = {"value": 1.0, "step": 0, "last_overflow": -1, "forgiven": 0}
    return {
        "optimizer": {"param_groups": [dict(group) for group in groups]},
        "lr_scheduler": None if lr_scheduler is None else dict(lr_scheduler),
        "loss_scale": dict(loss_scale or before),
        "rng": None,
        "buffers": dict(buffers or {}),
        "client_state": dict(client_state or {}),
    }


def unknown_kind(source: Path, kinds: Iterable[Iterable[str]]) -> CheckpointError:
    """Return the error for optimizer states of no kind, of several kinds, or of a kind that `KINDS` lacks."""
    named = "; ".join(", ".join(sorted(names)) for names in kinds) or "none"
    return CheckpointError(
        f"{source} has optimizer states of a kind that the engine has no counterpart of ({named}): it trains with "
        "Adam, AdamW, Adagrad, Lion and SGD"
    )


@contextmanager
def named_as_damaged(source: Path) -> Iterator[None]:
    """Convert errors that unexpected values cause in this context into a CheckpointError that names the source."""
    try:
        yield
    except (InfinityError, OSError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{source} is damaged: {type(error).__name__}: {error}") from error


def write_imported(target: Path, foreign: Foreign, progress: Progress = lambda done, total: None) -> Path:
    """Write a checkpoint into a directory of checkpoints, where it is loaded by default.

    Returns:
        The new checkpoint's directory.

    Raises:
        CheckpointError: values cannot be read, or a file that is no checkpoint has the tag's name.
        StorageError: writing failed.
    """
    content = serialise(foreign.extra)
    layout_with_moments(_FORMAT, *foreign.moments)  # raises if no optimizer has these moments
    check_replaceable(target / foreign.tag)
    tensors: dict[str, StoredTensor] = {}
    total, done = sum(param.numel for param in foreign.params), 0
    with replacing(target, foreign.tag) as directory, Staging() as staging:
        for index, params in enumerate(_files(foreign.params)):
            tensors |= _write_file(directory / f"unit-{index:05d}.safetensors", params, staging)
            done += sum(param.numel for param in params)
            progress(done, total)
        write_file(directory / EXTRA, content)
        manifest = Manifest(
            state_format=_FORMAT,
            moments=foreign.moments,
            tensors=tensors,
            steps={param.name: param.step for param in foreign.params if param.moments is not None and param.step},
            counters=foreign.counters,
            extra_crc=zlib.crc32(content),
            run=uuid.uuid4().hex,
        )
        write_file(directory / MANIFEST, manifest.to_bytes())
    return target / foreign.tag


def _files(params: Sequence[ForeignParam]) -> list[list[ForeignParam]]:
    """Return the parameters of each file, in order."""
    files: list[list[ForeignParam]] = []
    left_bytes = 0
    for param in params:
        nbytes = param.numel * torch.float32.itemsize * len(param.tensors())
        if not files or nbytes > left_bytes:
            files.append([])
            left_bytes = _FILE_BYTES
        files[-1].append(param)
        left_bytes -= nbytes
    return files


def _write_file(path: Path, params: Sequence[ForeignParam], staging: Staging) -> dict[str, StoredTensor]:
    found = {key: (param, values) for param in params for key, values in param.tensors().items()}

    def pieces(key: str) -> Iterator[torch.Tensor]:
        param, values = found[key]
        for start in range(0, param.numel, _CHUNK):
            yield values.read(start, min(start + _CHUNK, param.numel)).to(param.dtype)

    specs = {key: (param.dtype, param.shape) for key, (param, _) in found.items()}
    return write_whole(path, specs, pieces, staging)
