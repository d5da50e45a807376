"""Save and load codes: parameters of integers or other codes, which belong to no unit and have a file of their own.

A quantised base model is tens of gigabytes of codes, so at most one of its parameters has a second copy in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from infinity.checkpoint.blocks import Staging
from infinity.checkpoint.format import CODE_FIELD, Manifest
from infinity.checkpoint.shards import Specs
from infinity.checkpoint.stored import StoredReader, StoredTensor, write_whole
from infinity.checkpoint.sums import crc32
from infinity.errors import CheckpointError
from infinity.zero.model_parts import is_distributed
from infinity.zero.outside_units import codes

FILE = "codes.safetensors"
_CHUNK_BYTES = 64 << 20
_log = logging.getLogger(__name__)

Codes = Mapping[str, torch.Tensor]


def codes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the codes that are whole in this process, by name."""
    return {name: values for name, values in codes(model).items() if not is_distributed(values)}


def write_codes(
    directory: Path, specs: Specs, value: Callable[[str], torch.Tensor], progress: Callable[[], None]
) -> dict[str, StoredTensor]:
    """Write all codes into one file and flush it to the drive. Write no file if there are no codes.

    Args:
        specs: dtype and shape of each parameter, by name.
        value: returns the values of a parameter; called once for each.

    Returns:
        The stored tensors by key, for the manifest.

    Raises:
        CheckpointError: the file format has no name for a dtype.
        OSError: writing failed.
    """
    if not specs:
        return {}
    names = {f"{CODE_FIELD}.{name}": name for name in specs}

    def pieces(key: str) -> Iterator[torch.Tensor]:
        for piece in _pieces(value(names[key])):
            yield piece
            progress()

    with Staging() as staging:
        return write_whole(directory / FILE, {key: specs[name] for key, name in names.items()}, pieces, staging)


def check_codes(path: Path, manifest: Manifest, values: Codes, *, all_of_them: bool) -> None:
    """Check that the checkpoint's codes have the names, shapes and dtypes of the model's.

    Args:
        all_of_them: refuse a checkpoint that lacks some codes. Otherwise these keep the model's values.
    """
    saved = manifest.stored(CODE_FIELD)
    for name in saved.keys() - values.keys():
        raise CheckpointError(
            f"{path} has a parameter {name} of {saved[name].torch_dtype}, which the model does not have"
        )
    kept = []
    for name, value in values.items():
        if name not in saved:
            if all_of_them:
                raise CheckpointError(
                    f"{path} has no parameter {name}: it is of another model, or was saved without frozen ones "
                    "(load_module_strict=False keeps those)"
                )
            kept.append(name)
            continue
        was, now = (saved[name].shape, saved[name].torch_dtype), (tuple(value.shape), value.dtype)
        if was != now:
            raise CheckpointError(f"{path} has {name} as {was[0]} of {was[1]}; the model has {now[0]} of {now[1]}")
    if kept:
        _log.warning(
            "%s has no `%s` and %d other parameters of codes, which keep their values", path, kept[0], len(kept) - 1
        )


def load_codes(reader: StoredReader, manifest: Manifest, values: Codes) -> None:
    """Copy the codes of the checkpoint into the model. `check_codes` must have passed.

    Raises:
        CheckpointError: a file has changed since it was checked, or cannot be read any more.
    """
    for name in manifest.stored(CODE_FIELD):
        values[name].copy_(reader.whole(f"{CODE_FIELD}.{name}"))


class CodeSums:
    """A CRC-32 of each code parameter of a model, to compare the codes of two processes.

    A parameter is read again only if torch's version counter or its address has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[str, tuple[tuple[int, int], int]] = {}

    def now(self) -> dict[str, int]:
        """Return the checksums of the present values, by name."""
        for name, values in codes_of(self._model).items():
            state = values.data_ptr(), values._version
            if name not in self._known or self._known[name][0] != state:
                self._known[name] = state, _sum_of(values)
        return {name: total for name, (_, total) in self._known.items()}


def _sum_of(values: torch.Tensor) -> int:
    total = 0
    for piece in _pieces(values):
        total = crc32(piece.view(torch.uint8).numpy().data, total)
    return total


def _pieces(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, in flat tensors in host memory."""
    for piece in values.reshape(-1).split(_CHUNK_BYTES // values.itemsize):
        yield piece.cpu().contiguous()
