"""Save: every rank writes and flushes its own shards, then rank 0 makes the checkpoint be there.

[Note: several directories]
Ranks on several machines may give directories that they do not share. The lowest rank of each directory leads there: it
holds the lock, writes the manifest, which is the same everywhere, and renames. Rank 0 is the last to rename. A kill
meanwhile leaves directories of two checkpoints, of which rank 0's counts: see `resolve_replaced`.
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
        mark_latest: make it the one that is loaded by default.
        frozen: write frozen parameters and codes, too.
        keep_last: remove all but this many of the run's checkpoints in the directory; None keeps all.
    """

    mark_latest: bool = True
    frozen: bool = True
    keep_last: int | None = None


class Saving:
    """A checkpoint on its way: `begin`, `finish`, `close`; all ranks call each together, and see [Note: finishing].

    [Note: finishing]
    What lies between `begin` and `finish` is up to the caller: the shards are written into `shards`, by whomever. Until
    `finish` is over there is no such checkpoint, and `close` removes what there is of it.

    Args:
        run: which the directory belongs to from now on.
        steps: updates that each parameter has had.
        counters: of steps; all that is given is copied.
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
        """Directory for this rank's shards."""
        return self._new.path

    def begin(self, extra: Mapping[str, Any], codes: Codes) -> None:
        """Take the directory, and write into it what no unit holds.

        Args:
            extra: schedules, random states and the client's state: tensors and plain values only. Rank 0's counts.
            codes: parameters that are integers or other codes, as they are now.

        Raises:
            StorageError: the directory cannot be written.
            CheckpointError: `extra` or `codes` have something that could not be loaded safely, another run saves in
                this directory, or what has the tag's name is no checkpoint.
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
        """Have the checkpoint be there.

        Args:
            write: writes this rank's shards, which are on the drive when it returns.

        Returns:
            The checkpoint's directory.

        Raises:
            StorageError: writing failed on this rank; an earlier checkpoint of the same tag is still there. The other
                ranks get a CheckpointError that names it.
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
        """Remove what is not finished, and let others save here."""
        self._new.close()

    def _on_leaders(self, action: Callable[[], None], what: str) -> None:
        """Where ranks share a directory, one of them acts."""
        self._runtime.ranks.each(lambda: action() if self._leads else None, what)

    def _write_codes(self, codes: Codes) -> None:
        specs = {name: (value.dtype, tuple(value.shape)) for name, value in codes.items()}
        self._codes = write_codes(self._new.path, specs, codes.__getitem__, self._runtime.ranks.progress)

    def _complete(self, written: list[list[WrittenPart]]) -> None:
        """Write what says that the shards are a checkpoint."""
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
    surplus = max(0, len(steps) + 1 - keep_last)
    for tag in sorted(steps, key=lambda tag: steps[tag])[:surplus]:
        if tag != latest:
            remove(directory, tag)


def serialise(extra: Mapping[str, Any]) -> bytes:
    """Tensors and plain values as bytes that `torch.load` reads without running code.

    Raises:
        CheckpointError: there is something else among them, or they are more than is loaded.
    """
    buffer = io.BytesIO()
    try:
        torch.save(dict(extra), buffer)
    except Exception as error:  # whatever pickling objects to
        raise CheckpointError(f"client_state or the schedule's state cannot be saved: {error}") from error
    if buffer.tell() > MAX_BYTES:
        raise CheckpointError(
            f"buffers, client_state and the schedule's state are {format_size(buffer.tell())}, and a checkpoint is "
            f"loaded with {format_size(MAX_BYTES)} of them at most: keep large tensors in files of your own"
        )
    try:
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling objects to
        raise CheckpointError(
            "client_state and the schedule's state may hold tensors, numbers, strings, lists and dicts only, so that a "
            f"checkpoint can be loaded without running code: {error}"
        ) from error
    return buffer.getvalue()
