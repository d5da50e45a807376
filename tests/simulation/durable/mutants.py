"""Planted faults of what makes a step or a checkpoint last; the search has to find each."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infinity.checkpoint import blocks, directory, load, publish, save, stored
from infinity.checkpoint.commits import Commits
from infinity.checkpoint.session import Session
from infinity.checkpoint.snapshot import Snapshot
from infinity.errors import StorageError
from infinity.io import directory as io_directory
from infinity.tiers import records, run_files
from infinity.tiers.checksums import Checksums
from infinity.tiers.run_files import RunFiles
from infinity.tiers.slots import Slots
from infinity.tiers.swap import SwapSpace
from infinity.zero import adoption
from tests.simulation.durable import exports
from tests.simulation.durable.history import Violation
from tests.simulation.durable.search import Search
from tests.simulation.durable.world import Layout

_ONE, _TWO = Layout(), Layout(ranks=2)
_STEP = ("open", "step", "commit")
_SECOND = ("open", "step", "step", "commit")
_SAVED = ("open", "step", "step", "save")


class _Anything(bytes):
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


class _System:
    """The operating system with other flushes, for one module."""

    def __init__(self, flush: Callable[[int], None]) -> None:
        self.fsync = flush

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _nothing(*args: Any) -> None:
    """In the place of a call."""


def _flush_but(*, record: bool) -> _System:
    """Flushes the new record's file or its directory, and not the other."""

    def flush(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.endswith(".new") != record:
            os.fsync(descriptor)

    return _System(flush)


def _sync_after(space: SwapSpace, steps: Any) -> None:
    space.sync = lambda: None  # type: ignore[method-assign]
    _record(space, steps)
    _sync(space)


def _sync_whatever_fails(space: SwapSpace) -> None:
    with suppress(StorageError):
        _sync(space)


def _replace_in_place(files: RunFiles, content: bytes) -> None:
    with files.record_path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    io_directory.sync_directory(files.record_path.parent)


def _write_over(slots: Slots, extent: Any, span: Any, offset: int) -> Any:
    slots.wait_committed()
    return extent.parts(extent.newest, span, offset)


def _close_with_other_bits(slots: Slots, gate: Any) -> Any:
    bits, writes = _close_epoch(slots, gate)
    return bytes(bit ^ 1 for bit in bits), writes


def _tell_before_record(commits: Any, closed: Any) -> None:
    commits._commits += 1
    commits._meet_ranks()
    commits._runtime.swap.record((closed.generation,) if commits._last is None else (closed.generation, commits._last))
    commits._last = closed.generation


def _adopt_without_record(space: SwapSpace) -> None:
    if space.run is not None and space.run.found is not None:
        space.slots.adopt(space.run.found.generations[0].slots)


def _swap_after_removal(path: Path, temporary: Path, tag: str, mark_latest: bool) -> None:
    shutil.rmtree(path / tag, ignore_errors=True)
    _swap(path, temporary, tag, mark_latest)


def _remove_without_flush(path: Path, tag: str) -> None:
    (path / tag).rename(path / f".tmp-new-{tag}")
    shutil.rmtree(path / f".tmp-new-{tag}")


_sha256 = hashlib.sha256
_record, _sync, _close_epoch, _swap = SwapSpace.record, SwapSpace.sync, Slots.close_epoch, directory._swap
_BELIEVED = SimpleNamespace(sha256=lambda content: SimpleNamespace(digest=lambda: _Anything(_sha256(content).digest())))


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        why: what it does wrong.
        owner, name, value: the attribute that is another one.
        sequence: in which it is found, by `method` of `Search` in a `layout`; or of exports.
        first: event at which processes die that are killed.
    """

    why: str
    owner: Any
    name: str
    value: Any
    sequence: Sequence[str]
    method: str = "crashing"
    layout: Layout = _ONE
    first: int = 0


_OTHER_EQUAL = lambda data: _Anything()  # noqa: E731
MUTANTS = {
    # Steps.
    "slots_not_flushed": Mutant("the record comes without a flush of its slots", SwapSpace, "sync", _nothing, _STEP),
    "slots_flushed_late": Mutant("the slots are flushed behind the record", SwapSpace, "record", _sync_after, _STEP),
    "failed_flush_ignored": Mutant(
        "a flush that fails is no error", SwapSpace, "sync", _sync_whatever_fails, _STEP, "failing"
    ),
    "record_not_flushed": Mutant(
        "the record gets its name before it is flushed", run_files, "os", _flush_but(record=True), _STEP
    ),
    "record_name_not_flushed": Mutant(
        "nobody flushes the record's name", run_files, "os", _flush_but(record=False), _SECOND
    ),
    "record_in_place": Mutant("the record is overwritten", RunFiles, "_replace", _replace_in_place, _SECOND),
    "drive_without_name": Mutant(
        "nobody flushes the name of a new directory", io_directory, "sync_directory", _nothing, _STEP
    ),
    "written_over": Mutant("a step is written over the one before", Slots, "to_write", _write_over, (*_STEP, "step")),
    "slot_reused_early": Mutant(
        "a slot is written before the step that leaves it is committed",
        Slots,
        "wait_committed",
        _nothing,
        ("open", "step", "begin", "step", "step"),
    ),
    "undone_stays": Mutant(
        "what is taken back stays the newest",
        Slots,
        "roll_back",
        lambda slots, extent: True,
        ("open", "step", "undo", "commit"),
    ),
    "other_slots_named": Mutant(
        "the record names the slots that are written next", Slots, "close_epoch", _close_with_other_bits, _SECOND
    ),
    "told_before_record": Mutant(
        "ranks are told before the record is there", Commits, "_commit", _tell_before_record, _STEP, layout=_TWO
    ),
    "alone": Mutant(
        "a rank goes on without the others' records",
        Commits,
        "_meet_ranks",
        _nothing,
        ("open", "step", "step", "step"),
        layout=_TWO,
    ),
    "step_before_forgotten": Mutant(
        "a record has one step, where another rank may have the one before only",
        SwapSpace,
        "record",
        lambda space, steps: _record(space, steps[:1]),
        _SECOND,
        layout=_TWO,
    ),
    "newest_of_any": Mutant(
        "ranks go on from the newest step that any of them has",
        adoption,
        "_agreed",
        lambda told, path: max((max(each.steps) for each in told if each), default=None),
        _SECOND,
        layout=_TWO,
    ),
    "left_step_kept": Mutant(
        "a record keeps a step that the ranks have not gone on from",
        SwapSpace,
        "adopt",
        _adopt_without_record,
        _SECOND,
        "killed",
        layout=_TWO,
        first=8,
    ),
    "found_not_flushed": Mutant(
        "what a dead process has left unflushed is told of",
        adoption,
        "flush_names",
        _nothing,
        _SECOND,
        "killed",
        layout=_TWO,
        first=18,
    ),
    "record_believed": Mutant("nobody checks a record's sum", records, "hashlib", _BELIEVED, _SAVED, "damaged"),
    "reads_believed": Mutant(
        "what is read is not compared", Checksums, "verified", lambda sums, read, *where: read, _SAVED, "damaged"
    ),
    # Checkpoints.
    "blocks_believed": Mutant("nobody checks the sums of blocks", stored, "crc32", _OTHER_EQUAL, _SAVED, "damaged"),
    "shards_not_flushed": Mutant("shards are not flushed", blocks, "os", _System(_nothing), _SAVED),
    "manifest_not_flushed": Mutant(
        "the manifest is not flushed", save, "write_file", lambda path, content: path.write_bytes(content), _SAVED
    ),
    "renames_not_flushed": Mutant("no name is flushed", directory, "sync_directory", _nothing, _SAVED),
    "old_one_first": Mutant(
        "the old checkpoint goes before the new one comes", directory, "_swap", _swap_after_removal, (*_SAVED, "save")
    ),
    "not_restored": Mutant(
        "a save that died between its renames is not undone",
        directory,
        "restore_interrupted",
        _nothing,
        (*_SAVED, "save"),
    ),
    "not_resolved": Mutant(
        "nobody asks which of two machines' checkpoints counts",
        load,
        "resolve_replaced",
        _nothing,
        (*_SAVED, "step", "save"),
        layout=Layout(ranks=2, apart=True),
    ),
    "saved_before_committed": Mutant(
        "a checkpoint comes before its step is committed",
        Session,
        "_begin",
        lambda session, what: session.finish_saving(),
        ("open", "step", "save"),
    ),
    "saved_after_update": Mutant(
        "a tile is saved after the update that changes it",
        Snapshot,
        "_before_update",
        _nothing,
        (*_SAVED, "begin", "step", "step"),
    ),
    "pruned_by_its_name": Mutant(
        "files of an older checkpoint go before its name", save, "remove", _remove_without_flush, (*_SAVED, "keep")
    ),
    # Exports.
    "moves_not_flushed": Mutant(
        "an index comes before its shards", publish, "sync_directory", _nothing, ("shards", "shards"), "exports"
    ),
    "export_not_flushed": Mutant("an export is not flushed", publish, "_flush", _nothing, ("file",), "exports"),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The fault is there until the context ends."""
    mutant = MUTANTS[name]
    real = getattr(mutant.owner, mutant.name)
    setattr(mutant.owner, mutant.name, mutant.value)
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, real)


def find(name: str) -> Violation | None:
    """What the search says of it."""
    mutant, search = MUTANTS[name], Search(MUTANTS[name].layout, 4)
    with planted(name):
        try:
            if mutant.method == "exports":
                exports.search(mutant.sequence, 4)
            elif mutant.method == "killed":
                search.killed(mutant.sequence, mutant.first)
            else:
                getattr(search, mutant.method)(mutant.sequence)
        except Violation as violation:
            return violation
    return None
