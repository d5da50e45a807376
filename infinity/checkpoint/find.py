"""Which checkpoint of a directory is meant."""

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
    run = None
    with suppress(CheckpointError):
        run = read_manifest(directory / newest).run
    found = _newest_of_others(directory, damaged, run)
    if found is None and failure is not None:
        raise failure
    if found is not None:
        _log.warning("the checkpoint that was saved last is not whole; trying `%s`: %s", found.tag, damaged[newest])
    return found


def _read(directory: Path, tag: str) -> Found:
    stored = read_manifest_bytes(directory / tag)
    parse_manifest(directory / tag, stored)
    return Found(tag, stored)


def _newest_of_others(directory: Path, damaged: MutableMapping[str, CheckpointError], run: str | None) -> Found | None:
    """The one that was written last of those not known to be damaged, of this run if one is given."""
    candidates = []
    others: list[str] = []
    with suppress(OSError):  # the drive fails: the error of the one that is meant says so
        others = tags(directory)
    for path in [directory / tag for tag in others if tag not in damaged]:
        with suppress(CheckpointError, OSError):
            stored, written = read_manifest_bytes(path), (path / MANIFEST).stat().st_mtime_ns
            manifest = parse_manifest(path, stored)
            if run in (None, manifest.run):
                candidates.append(((written, manifest.counters["global_steps"]), Found(path.name, stored)))
    return max(candidates, key=lambda one: one[0])[1] if candidates else None
