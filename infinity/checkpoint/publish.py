"""Publish an export. A kill at any moment leaves a complete export, or a directory without one that a loader accepts.

[Note: exports and their generations]
The file that a loader opens first, the entry, is the index, or the single file of weights. New shards have names that
no file in the directory has, so that the index of one export never names shards of another. They are moved in before
their index, and the old shards are removed after it. The entry is replaced by one rename. That is not enough if the
directory has an entry of the other kind, or if the configuration changes too. Then the old entry is removed first and
the new one is moved in last: in between, the directory has no weights that a loader accepts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from infinity.checkpoint.files import discard, open_plain
from infinity.checkpoint.pretrained import INDEX, WEIGHTS
from infinity.errors import CheckpointError
from infinity.io.directory import sync_directory

_SHARD = re.compile(r"(model(?:-g\d+)?)-\d{5}-of-\d{5}\.safetensors")


def new_stem(directory: Path) -> str:
    """Return a prefix for the names of shards that no shard in the directory has."""
    taken = {found[1] for path in directory.iterdir() if (found := _SHARD.fullmatch(path.name))}
    stem, generation = "model", 0
    while stem in taken:
        generation += 1
        stem = f"model-g{generation}"
    return stem


def publish(unfinished: Path, directory: Path) -> None:
    """Move an export's files into `directory`, where they replace an earlier export, see the note above.

    Raises:
        OSError: a file cannot be moved.
    """
    names = {path.name for path in unfinished.iterdir()}
    for name in names:
        _flush(unfinished / name)
    entry = INDEX if INDEX in names else WEIGHTS
    shards = {name for name in names if _SHARD.fullmatch(name)}
    beside = names - shards - {entry}
    _move(shards, unfinished, directory)
    other = WEIGHTS if entry == INDEX else INDEX
    if os.path.lexists(directory / other) or any(_differ(unfinished / name, directory / name) for name in beside):
        discard(directory / INDEX)
        discard(directory / WEIGHTS)
        sync_directory(directory)
    _move(beside, unfinished, directory)
    _move({entry}, unfinished, directory)
    for path in directory.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in shards:
            discard(path)


def _move(names: set[str], source: Path, target: Path) -> None:
    """Move files of these names. Their new names are on the drive when this returns."""
    for name in sorted(names):
        (source / name).replace(target / name)
    sync_directory(target)


def _flush(path: Path) -> None:
    with open_plain(path) as file:
        os.fsync(file.fileno())


def _differ(first: Path, second: Path) -> bool:
    try:
        with open_plain(first) as one, open_plain(second) as other:
            return one.read() != other.read()
    except CheckpointError:  # the second file does not exist, or is no plain file
        return True
