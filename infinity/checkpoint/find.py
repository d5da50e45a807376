"""Find the checkpoint of a directory that is to be loaded."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.directory import check_tag, latest_tag, tags
from infinity.checkpoint.format import MANIFEST, UnknownFormatError, parse_manifest, read_manifest, read_manifest_bytes
from infinity.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint with a valid manifest.

    Attributes:
        manifest: the bytes of the manifest.
    """

    tag: str
    manifest: bytes


def find_checkpoint(directory: Path, tag: str | None, damaged: MutableMapping[str, CheckpointError]) -> Found | None:
    """Return the checkpoint that is to be loaded.

    Args:
        tag: None for the last saved checkpoint or, if it is damaged, the newest other one of the same run.
        damaged: the errors of damaged checkpoints, by tag. These are skipped; newly found ones are added.

    Returns:
        None if the directory has no checkpoint, or only those that were in `damaged` before.

    Raises:
        CheckpointError: the wanted checkpoint is damaged, and there is no other.
    """
    if tag is not None:
        check_tag(tag)
        return _read(directory, tag)
    newest = latest_tag(directory)
    if newest is None:
        _warn_of_unmarked(directory)
        return None
    failure: CheckpointError | None = None
    if newest not in damaged:
        try:
            return _read(directory, newest)
        except UnknownFormatError:
            raise
        except CheckpointError as error:
            damaged[newest] = failure = error
    run = None
    with suppress(CheckpointError):
        run = read_manifest(directory / newest).run
    found = _newest_of_others(directory, damaged, run)
    if found is None and failure is not None:
        raise failure
    if found is not None:
        _log.warning("the checkpoint that was saved last is not whole; trying `%s`: %s", found.tag, damaged[newest])
    return found


def _warn_of_unmarked(directory: Path) -> None:
    """Warn of checkpoints that are not loaded, because the directory has no file `latest`."""
    if (directory / MANIFEST).is_file():
        _log.warning("%s is a checkpoint: give the directory that it is in, and its name as the tag", directory)
    others = [other for other in tags(directory) if (directory / other / MANIFEST).is_file()]
    if others:
        _log.warning(
            "%s has no file `latest`, so none of its checkpoints is loaded (%s): write the name of one into it, or "
            "give it as the tag",
            directory,
            ", ".join(others),
        )


def _read(directory: Path, tag: str) -> Found:
    stored = read_manifest_bytes(directory / tag)
    parse_manifest(directory / tag, stored)
    return Found(tag, stored)


def _newest_of_others(directory: Path, damaged: MutableMapping[str, CheckpointError], run: str | None) -> Found | None:
    """Return the checkpoint that was written last, without those in `damaged`; of run `run` if it is not None."""
    candidates = []
    others: list[str] = []
    with suppress(OSError):  # the drive fails: the caller raises the error of the wanted checkpoint
        others = tags(directory)
    for path in [directory / tag for tag in others if tag not in damaged]:
        with suppress(CheckpointError, OSError):
            stored, written = read_manifest_bytes(path), (path / MANIFEST).stat().st_mtime_ns
            manifest = parse_manifest(path, stored)
            if run in (None, manifest.run):
                candidates.append(((written, manifest.counters["global_steps"]), Found(path.name, stored)))
    return max(candidates, key=lambda one: one[0])[1] if candidates else None
