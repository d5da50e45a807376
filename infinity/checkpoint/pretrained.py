"""Read weights in transformers' directory format, one parameter at a time."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from infinity.checkpoint.extra import persistent_buffers
from infinity.checkpoint.files import is_file_name, parse_json, read_plain
from infinity.checkpoint.tensors import RangeReader, TensorEntry, read_header
from infinity.errors import CheckpointError, ConfigError
from infinity.tiers import StoredTensor, WeightFile
from infinity.zero.model_parts import has_numbers

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

_SAMPLES, _SAMPLE_NUMEL = 8, 256

_log = logging.getLogger(__name__)


class PretrainedWeights:
    """The stored values of a model's parameters; a `WeightSource` of `infinity.initialize`.

    A parameter is found under any of its names (tied ones have several), with or without the prefix of the base model
    in a model with a head.

    Args:
        directory: has `model.safetensors`, or shards and their index.
        model: the model that the weights are for. It is not changed.
        in_place: read frozen parameters from these files during training, without a copy.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: weights and model do not fit one another. The message names a parameter.
    """

    def __init__(self, directory: str | Path, model: nn.Module, *, in_place: bool = False) -> None:
        directory = Path(directory)
        files = {path.name: WeightFile.of(path) for path in directory.glob("*.safetensors")} if in_place else {}
        entries = _entries(directory)  # read after `WeightFile.of`, so that a change in between is detected later
        self._directory = directory
        self._files = files
        self._keys = _match(model, entries)
        _check(directory, model, self._keys, entries)

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def read(self, name: str) -> torch.Tensor:
        """Read a parameter or buffer, in its shape and in the dtype of the file."""
        _, entry = self._keys[name]
        return self.read_slice(name, 0, math.prod(entry.shape)).view(entry.shape)

    def read_slice(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Read elements `[start, start + numel)` of a parameter, flat, in the dtype of the file."""
        key, entry = self._keys[name]
        with closing(RangeReader(self._directory)) as files:
            return files.read_elements(key, entry, start, numel)

    def fingerprint(self, name: str) -> str:
        """Return dtype, shape and a digest of a sample of a parameter's elements: different weights differ in it."""
        key, entry = self._keys[name]
        numel = math.prod(entry.shape)
        samples = hashlib.sha256()
        with closing(RangeReader(self._directory)) as files:
            for index in range(_SAMPLES):
                start = numel * index // _SAMPLES
                taken = files.read_elements(key, entry, start, min(_SAMPLE_NUMEL, numel - start))
                samples.update(taken.view(torch.uint8).numpy().tobytes())
        return f"{entry.dtype} {entry.shape} {samples.hexdigest()}"

    def stored(self, name: str) -> StoredTensor | None:
        """Return the place of a parameter's values in its file; None if it is not read in place."""
        _, entry = self._keys[name]
        file = self._files.get(entry.file)
        return None if file is None else StoredTensor(file, entry.start, entry.nbytes, entry.torch_dtype)

    def load_buffers(self, model: nn.Module) -> None:
        """Copy stored values into the model's persistent buffers. Buffers without stored values are unchanged."""
        with torch.no_grad():
            for name, buffer in persistent_buffers(model).items():
                if name in self._keys and not buffer.is_meta:
                    buffer.copy_(self.read(name))


def _entries(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the directory by key."""
    index = directory / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(directory / WEIGHTS):
            raise CheckpointError(
                f"{directory} has neither {WEIGHTS} nor {INDEX}: save the model there with "
                "save_pretrained(..., safe_serialization=True)"
            )
        return read_header(directory / WEIGHTS)
    stored = read_plain(index)
    try:
        files = {str(key): str(name) for key, name in parse_json(stored)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    headers = {}
    for name in set(files.values()):
        if not is_file_name(name):
            raise CheckpointError(f"{index} names the file {name!r}, which leaves the directory")
        headers[name] = read_header(directory / name)
    for key, name in files.items():
        if key not in headers[name]:
            raise CheckpointError(f"{index} says that {name} has tensor {key}, but it does not")
    return {key: headers[name][key] for key, name in files.items()}


def _match(model: nn.Module, entries: dict[str, TensorEntry]) -> dict[str, tuple[str, TensorEntry]]:
    """Return key and entry of every stored parameter and buffer, by each of its names in the model."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        aliases.setdefault(id(tensor), []).append(name)
    base = str(getattr(model, "base_model_prefix", "") or "")
    found = {}
    for names in aliases.values():
        spellings = [*names]
        if base:
            spellings += [name.removeprefix(f"{base}.") for name in names] + [f"{base}.{name}" for name in names]
        key = next((spelling for spelling in spellings if spelling in entries), None)
        if key is not None:
            found.update(dict.fromkeys(names, (key, entries[key])))
    return found


def _check(
    directory: Path,
    model: nn.Module,
    found: dict[str, tuple[str, TensorEntry]],
    entries: dict[str, TensorEntry],
) -> None:
    params = {name: param for name, param in model.named_parameters() if has_numbers(param)}
    for name, tensor in (*params.items(), *persistent_buffers(model).items()):
        if name not in found:
            continue
        key, entry = found[name]
        if entry.shape != tuple(tensor.shape):
            raise ConfigError(f"{directory} has {key} in shape {entry.shape}; the model has {tuple(tensor.shape)}")
        if name in params and (not entry.torch_dtype.is_floating_point or entry.torch_dtype.itemsize == 1):
            raise ConfigError(f"{directory} has {key} in {entry.dtype}: quantised weights cannot be trained")
    missing = [name for name in params if name not in found]
    unknown = sorted(entries.keys() - {key for key, _ in found.values()})
    if missing and unknown:
        raise ConfigError(
            f"{directory} has no values for parameter {missing[0]} ({len(missing)} such), but has tensor {unknown[0]} "
            f"({len(unknown)} such), which the model does not have: they are of another architecture, or stored under "
            "names that transformers changes while it loads. Load the model in memory and pass it to "
            "infinity.initialize"
        )
    if unknown:
        _log.warning("%s has tensors that the model does not use, such as %s", directory, unknown[0])
