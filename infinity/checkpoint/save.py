"""Save checkpoints: every rank writes and flushes its own shards, then the leaders publish the checkpoint.

[Note: several directories]
Ranks on several machines may give directories that they do not share. The lowest rank of each directory is its leader:
it holds the lock, writes the manifest, which is the same in all directories, and renames. Rank 0 is the last to rename.
A kill in between leaves directories with different checkpoints; rank 0's counts, see `resolve_replaced`.
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.codes import Codes, write_codes
from infinity.checkpoint.directory import (
    Replacement,
    latest_tag,
    make_directory,
    remove,
    resolve_replaced,
    tags,
    writing,
)
from infinity.checkpoint.files import MAX_BYTES, write_file
from infinity.checkpoint.format import EXTRA, MANIFEST, Manifest, check_replaceable, read_manifest
from infinity.checkpoint.runs import Run
from infinity.checkpoint.shards import WrittenPart, assemble
from infinity.checkpoint.stored import StoredTensor
from infinity.config import format_size
from infinity.errors import CheckpointError
from infinity.zero.build import Runtime
from infinity.zero.shared_directory import directory_leaders

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a checkpoint is saved.

    Attributes:
        mark_latest: let it be the checkpoint that is loaded by default.
        frozen: write frozen parameters and codes, too.
        keep_last: remove all but this many of the run's checkpoints in the directory; None keeps all.
    """

    mark_latest: bool = True
    frozen: bool = True
    keep_last: int | None = None


class Saving:
    """A checkpoint that is being saved: `begin`, `finish`, `close`. All ranks call each of these together.

    [Note: finishing]
    Between `begin` and `finish`, the caller may write shards into the directory `shards`, from any thread. The
    checkpoint does not exist until `finish` has returned; before, `close` removes the unfinished files.

    Args:
        run: the run that owns the directory from now on.
        steps: number of updates of each parameter. Copied.
        counters: the engine's step counters. Copied.
    """

    def __init__(
        self,
        directory: Path,
        tag: str,
        runtime: Runtime,
        *,
        run: Run,
        steps: Mapping[str, int],
        counters: Mapping[str, int],
        options: Options,
    ) -> None:
        self.path = directory / tag
        self._directory = directory
        self._runtime = runtime
        self._run = run
        self._steps = dict(steps)
        self._counters = dict(counters)
        self._options = options
        self._new = Replacement(directory, tag, mark_latest=options.mark_latest)
        self._content = b""
        self._codes: dict[str, StoredTensor] = {}
        self._leads = False

    @property
    def shards(self) -> Path:
        """The directory for this rank's shards."""
        return self._new.path

    def begin(self, extra: Mapping[str, Any], codes: Codes) -> None:
        """Lock the directory, and write the values that belong to no unit.

        Args:
            extra: schedules, random states and the client's state: tensors and plain values only. Rank 0's is saved.
            codes: parameters that are integers or other codes.

        Raises:
            StorageError: the directory cannot be written.
            CheckpointError: `extra` or `codes` have a value that could not be loaded safely, another run saves in this
                directory, or the tag's name is taken by a file that is no checkpoint.
        """
        ranks, directory = self._runtime.ranks, self._directory
        with writing(self.path):
            given = extra if ranks.rank == 0 else None
            self._content = ranks.each(lambda: _begin(directory, given), "saving: the beginning")[0]
            self._leads = directory_leaders(ranks, directory)[ranks.rank] == ranks.rank
            resolve_replaced(ranks, directory)
            self._on_leaders(lambda: _take(self._new, self.path, self._run), "saving: the directory")
            self._on_leaders(lambda: self._write_codes(codes), "saving: the codes")

    def finish(self, write: Callable[[], list[WrittenPart]]) -> Path:
        """Write the rest of the checkpoint and publish it.

        Args:
            write: writes this rank's shards, and returns when they are on the drive.

        Returns:
            The checkpoint's directory.

        Raises:
            StorageError: writing failed on this rank. An earlier checkpoint of the same tag is unchanged. The other
                ranks get a CheckpointError that names this rank.
        """
        ranks, new, options = self._runtime.ranks, self._new, self._options
        with writing(self.path):
            written = ranks.each(write, "saving: the shards")
            self._on_leaders(lambda: self._complete(written), "saving: the manifest")
            ranks.each(lambda: new.publish() if self._leads and ranks.rank else None, "saving: the other directories")
            ranks.each(lambda: None if ranks.rank else new.publish(), "saving: the end")
            self._on_leaders(new.remove_replaced, "saving: what it replaces")
            keep_last = options.keep_last
            if keep_last is not None:
                prune = partial(_prune, self._directory, self.path.name, self._run, keep_last)
                self._on_leaders(prune, "saving: the older ones")
        return self.path

    def close(self) -> None:
        """Remove the files of an unfinished checkpoint, and release the lock."""
        self._new.close()

    def _on_leaders(self, action: Callable[[], None], what: str) -> None:
        """Run the action on the leader of each directory. All ranks call this together."""
        self._runtime.ranks.each(lambda: action() if self._leads else None, what)

    def _write_codes(self, codes: Codes) -> None:
        specs = {name: (value.dtype, tuple(value.shape)) for name, value in codes.items()}
        self._codes = write_codes(self._new.path, specs, codes.__getitem__, self._runtime.ranks.progress)

    def _complete(self, written: list[list[WrittenPart]]) -> None:
        """Write `extra.pt` and the manifest, which make the shards a checkpoint."""
        layout, run = self._runtime.layout, self._run
        tensors = assemble(self._runtime, written, frozen=self._options.frozen)
        manifest = Manifest(
            state_format=layout.format,
            moments=(layout.first, layout.second),
            tensors=tensors | self._codes,
            steps=self._steps,
            counters=self._counters,
            extra_crc=zlib.crc32(self._content),
            ranks=self._runtime.ranks.size,
            run=run.id,
            model=run.model,
        )
        write_file(self._new.path / EXTRA, self._content)
        write_file(self._new.path / MANIFEST, manifest.to_bytes())


def _begin(directory: Path, extra: Mapping[str, Any] | None) -> bytes:
    """Make the directory, and return the content of `extra.pt` (empty if `extra` is None)."""
    make_directory(directory)
    return b"" if extra is None else serialise(extra)


def _take(new: Replacement, path: Path, run: Run) -> None:
    """Lock the directory for this run, check that the tag can be replaced, and begin the replacement."""
    run.claim(path.parent)
    check_replaceable(path)
    if (path / MANIFEST).exists():
        _warn_of_another_run(path, run)
    new.begin()


def _warn_of_another_run(path: Path, run: Run) -> None:
    try:
        saved_by = read_manifest(path).run
    except CheckpointError:
        return  # to replace a damaged checkpoint needs no warning
    if saved_by is not None and saved_by != run.id:
        _log.warning("%s is the checkpoint of another run (%s), and is replaced by this run's", path, saved_by)


def _prune(directory: Path, newest: str, run: Run, keep_last: int) -> None:
    """Remove this run's checkpoints except the last ones, unreadable ones, and the one that `latest` names."""
    steps: dict[str, int] = {}
    latest = latest_tag(directory)
    for tag in tags(directory):
        with suppress(CheckpointError):
            manifest = read_manifest(directory / tag)
            if manifest.run == run.id and tag != newest:
                steps[tag] = manifest.counters["global_steps"]
    surplus = max(0, len(steps) + 1 - keep_last)
    for tag in sorted(steps, key=lambda tag: steps[tag])[:surplus]:
        if tag != latest:
            remove(directory, tag)


def serialise(extra: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values as bytes that `torch.load` reads without running code.

    Raises:
        CheckpointError: there are other values among them, or they are larger than `MAX_BYTES`.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(extra), buffer)
    except Exception as error:  # objects can raise any exception when they are pickled
        raise CheckpointError(f"client_state or the schedule's state cannot be saved: {error}") from error
    if buffer.tell() > MAX_BYTES:
        raise CheckpointError(
            f"buffers, client_state and the schedule's state are {format_size(buffer.tell())}, and a checkpoint is "
            f"loaded with {format_size(MAX_BYTES)} of them at most: keep large tensors in files of your own"
        )
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # as the load of a checkpoint would
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()
