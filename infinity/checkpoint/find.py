"""Which checkpoint of a directory is meant."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.directory import check_tag, latest_tag, tags
from infinity.checkpoint.format import MANIFEST, UnknownFormatError, parse_manifest, read_manifest_bytes
from infinity.errors import CheckpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint whose manifest is whole.

    Attributes:
        manifest: as it is stored.
    """

    tag: str
    manifest: bytes


def find_checkpoint(directory: Path, tag: str | None, damaged: MutableMapping[str, CheckpointError]) -> Found | None:
    """The checkpoint that is to be loaded.

    Args:
        tag: None for the one that was saved last, and where that is damaged for the newest of the others of its run.
        damaged: those that are known to be, and why; added to.

    Returns:
        None if there is none but for those that were known to be damaged.

    Raises:
        CheckpointError: the one that is meant is damaged, and there is no other.
    """
    if tag is not None:
        check_tag(tag)
        return _read(directory, tag)
    newest = latest_tag(directory)
    if newest is None:
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
        return None
    failure: CheckpointError | None = None
    if newest not in damaged:
        try:
            return _read(directory, newest)
        except UnknownFormatError:
            raise
        except CheckpointError as error:
            damaged[newest] = failure = error
    found = _newest_of_others(directory, damaged, _run_of(directory, newest))
    if found is None and failure is not None:
        raise failure
    if found is not None:
        _log.warning("the checkpoint that was saved last is not whole; trying `%s`: %s", found.tag, damaged[newest])
    return found


def _read(directory: Path, tag: str) -> Found:
    stored = read_manifest_bytes(directory / tag)
    parse_manifest(directory / tag, stored)
    return Found(tag, stored)


def _run_of(directory: Path, tag: str) -> str | None:
    try:
        return parse_manifest(directory / tag, _read(directory, tag).manifest).run
    except CheckpointError:
        return None


def _newest_of_others(directory: Path, damaged: MutableMapping[str, CheckpointError], run: str | None) -> Found | None:
    """The one that was written last of those not known to be damaged, of this run if one is given."""
    candidates = []
    try:
        others = tags(directory)
    except OSError:  # the drive fails: the error of the one that is meant says so
        others = []
    for tag in others:
        if tag in damaged or not (directory / tag / MANIFEST).is_file():
            continue
        try:
            found = _read(directory, tag)
            manifest = parse_manifest(directory / tag, found.manifest)
            written = (directory / tag / MANIFEST).stat().st_mtime_ns
        except (CheckpointError, OSError):
            continue
        if run in (None, manifest.run):
            candidates.append(((written, manifest.counters["global_steps"]), found))
    return max(candidates, key=lambda one: one[0])[1] if candidates else None
