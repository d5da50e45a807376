"""Puts an export in its place, so that a kill at any moment leaves one that is whole or one that no loader takes.

[Note: exports and their generations]
What a loader opens first, the entry, is the index, or the one file of weights. Shards have names that no file in the
directory has, so that the index of one export never leads to the shards of another; they come before their index, and
go after the next one. The entry is replaced by one rename. Where that is not enough, because the other kind of entry
is there or because the configuration changes too, the old entry goes first: until the new one comes, which is last, the
directory has no weights that a loader would take.
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
    """What the names of shards begin with, so that none is in the directory yet."""
    taken = {found[1] for path in directory.iterdir() if (found := _SHARD.fullmatch(path.name))}
    stem, generation = "model", 0
    while stem in taken:
        generation += 1
        stem = f"model-g{generation}"
    return stem


def publish(unfinished: Path, directory: Path) -> None:
    """Move an export's files into `directory`, where they replace an earlier export; see the note.

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
    """Move files of these names; they are there for good when it returns."""
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
    except CheckpointError:  # the second is not there, or something else
        return True
