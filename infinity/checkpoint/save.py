"""Save: every rank writes and flushes its own shards, then rank 0 makes the checkpoint be there.

[Note: several directories]
Ranks on several machines may give directories that they do not share. The lowest rank of each directory leads there: it
holds the lock, writes the manifest, which is the same everywhere, and renames. Rank 0 is the last to rename. A kill
meanwhile leaves directories of two checkpoints, which `load.py` tells by their manifests.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.directory import Replacement, latest_tag, make_directory, remove, tags, writing
from infinity.checkpoint.files import write_file
from infinity.checkpoint.format import EXTRA, MANIFEST, Manifest, check_replaceable, read_manifest
from infinity.checkpoint.runs import Run
from infinity.checkpoint.shards import assemble, write_shards
from infinity.errors import CheckpointError
from infinity.zero.build import Runtime
from infinity.zero.shared_directory import directory_leaders

_log = logging.getLogger(__name__)


def save_checkpoint(
    directory: Path,
    tag: str,
    runtime: Runtime,
    *,
    run: Run,
    steps: Mapping[str, int],
    counters: Mapping[str, int],
    extra: Mapping[str, Any],
    mark_latest: bool = True,
    frozen: bool = True,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint; all ranks call this together, and no update may be pending.

    Args:
        run: which the directory belongs to from now on.
        steps: updates that each parameter has had.
        extra: schedules, random states and the client's state: tensors and plain values only. Rank 0's counts.
        mark_latest: make it the one that is loaded by default.
        frozen: write frozen parameters, too.
        keep_last: remove all but this many of the run's checkpoints in the directory; None keeps all.

    Returns:
        The checkpoint's directory.

    Raises:
        StorageError: writing failed on this rank; an earlier checkpoint of the same tag is still there. The other ranks
            get a CheckpointError that names it.
        CheckpointError: `extra` has something that could not be loaded safely, another run saves in this directory, or
            what has the tag's name is no checkpoint.
    """
    ranks, path = runtime.ranks, directory / tag
    new = Replacement(directory, tag, mark_latest=mark_latest)
    with closing(new), writing(path):
        content = ranks.each(lambda: _begin(directory, extra if ranks.rank == 0 else None), "saving: the beginning")[0]
        leaders = directory_leaders(ranks, directory)
        leads = leaders[ranks.rank] == ranks.rank
        ranks.each(lambda: _take(new, path, run) if leads else None, "saving: the directory")
        written = ranks.each(lambda: write_shards(new.path, runtime, frozen=frozen), "saving: the shards")

        def complete() -> None:
            layout, tensors = runtime.layout, assemble(runtime, written, frozen=frozen)
            moments, crc = (layout.first, layout.second), zlib.crc32(content)
            manifest = Manifest(layout.format, moments, tensors, steps, counters, crc, ranks.size, run.id, run.model)
            write_file(new.path / EXTRA, content)
            write_file(new.path / MANIFEST, manifest.to_bytes())

        ranks.each(lambda: complete() if leads else None, "saving: the manifest")
        ranks.each(lambda: new.publish() if leads and ranks.rank else None, "saving: the other directories")
        ranks.each(lambda: None if ranks.rank else new.publish(), "saving: the end")
        if keep_last is not None:
            ranks.each(lambda: _prune(directory, tag, run, keep_last) if leads else None, "saving: the older ones")
    return path


def _begin(directory: Path, extra: Mapping[str, Any] | None) -> bytes:
    """Make the directory, and what goes into the file beside the tensors."""
    make_directory(directory)
    return b"" if extra is None else serialise(extra)


def _take(new: Replacement, path: Path, run: Run) -> None:
    """Start in a directory that is this run's alone, and of nothing but checkpoints."""
    run.claim(path.parent)
    check_replaceable(path)
    if (path / MANIFEST).exists():
        _tell_of_another_run(path, run)
    new.begin()


def _tell_of_another_run(path: Path, run: Run) -> None:
    try:
        saved_by = read_manifest(path).run
    except CheckpointError:
        return  # a damaged one is no loss
    if saved_by is not None and saved_by != run.id:
        _log.warning("%s is the checkpoint of another run (%s), and is replaced by this run's", path, saved_by)


def _prune(directory: Path, newest: str, run: Run, keep_last: int) -> None:
    """Remove this run's checkpoints but for the last ones; what cannot be read, and what `latest` names, stays."""
    steps: dict[str, int] = {}
    latest = latest_tag(directory)
    for tag in tags(directory):
        with suppress(CheckpointError):
            manifest = read_manifest(directory / tag)
            if manifest.run == run.id and tag != newest:
                steps[tag] = manifest.counters["global_steps"]
    for tag in sorted(steps, key=lambda tag: steps[tag])[: len(steps) + 1 - keep_last]:
        if tag != latest:
            remove(directory, tag)


def serialise(extra: Mapping[str, Any]) -> bytes:
    """Tensors and plain values as bytes that `torch.load` reads without running code.

    Raises:
        CheckpointError: there is something else among them.
    """
    buffer = io.BytesIO()
    torch.save(dict(extra), buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()
