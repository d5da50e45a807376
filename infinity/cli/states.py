"""`infinity states`: list and remove the states that runs with tiering.crash_consistent keep on a drive."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.arguments import path_argument
from infinity.config import format_size
from infinity.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from infinity.tiers.records import Record
    from infinity.tiers.run_files import KeptFile


@dataclass(frozen=True)
class _Kept:
    """The states of one rank of a run in a directory.

    Attributes:
        step: the step that they hold; None if it is unknown.
        nbytes: their size on the drive.
        in_use: whether a running process uses them.
        problem: why the run cannot be resumed from them, or None.
    """

    run: str
    rank: int
    step: int | None
    nbytes: int
    in_use: bool
    problem: str | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "states", help="list or remove the states that crash-consistent runs keep on a drive"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add(commands, "list", _list, "list the runs that have kept states, and their step")
    removing = _add(commands, "remove", _remove, "remove the states of runs that have ended; this cannot be undone")
    removing.add_argument("--run", dest="name", metavar="RUN", help="only those of this run (default: of all runs)")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("directory", type=path_argument, help="a path of tiering.nvme")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output")
    parser.set_defaults(run=run)
    return parser


def _list(args: argparse.Namespace) -> int:
    found = _look(args.directory)
    if args.json:
        print(json.dumps([asdict(each) for each in found]))
        return 0
    for each in found:
        state = "in use" if each.in_use else each.problem or "can be resumed"
        step = "step ?" if each.step is None else f"step {each.step:,}"
        print(f"run {each.run}  rank {each.rank}  {step}  {format_size(each.nbytes)}  {state}")
    if not found:
        print(f"{args.directory}: no states of any run")
    return 0


def _remove(args: argparse.Namespace) -> int:
    from infinity.tiers.run_files import remove

    files = _files(args.directory)
    if args.name is not None:
        files = [file for file in files if file.run == args.name]
        if not files:
            raise ConfigError(f"--run {args.name} has no states in {args.directory}")
    own = [file for file in files if file.foreign is None]
    nbytes = sum(map(_size, own))
    remove(own)
    runs = sorted({file.run for file in own})
    if args.json:
        print(json.dumps({"runs": runs, "bytes": nbytes}))
    else:
        print(f"{args.directory}: removed {format_size(nbytes)} of {len(runs)} runs")
    for file in files:
        if file.foreign is not None:
            print(f"{file.path} is left: {file.foreign}", file=sys.stderr)
    return 0


def _size(file: KeptFile) -> int:
    with suppress(FileNotFoundError):  # another process may have removed it
        return file.path.lstat().st_size
    return 0


def _files(directory: Path) -> list[KeptFile]:
    from infinity.tiers.run_files import kept_files

    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory; give a path of tiering.nvme")
    return kept_files(directory)


def _look(directory: Path) -> list[_Kept]:
    """Return the kept states in a directory, by run and rank."""
    groups: dict[tuple[str, int], list[KeptFile]] = {}
    for file in _files(directory):
        groups.setdefault((file.run, file.rank), []).append(file)
    return [_describe(run, rank, files) for (run, rank), files in sorted(groups.items())]


def _describe(run: str, rank: int, files: list[KeptFile]) -> _Kept:
    from infinity.tiers.run_files import is_locked

    step, problem = _resumable(files)
    nbytes = sum(map(_size, files))
    in_use = any(is_locked(file.path) for file in files if file.is_data and file.foreign is None)
    return _Kept(run, rank, step, nbytes, in_use, problem)


def _resumable(files: list[KeptFile]) -> tuple[int | None, str | None]:
    """Return the step of one rank's files (None: unknown), and why the run cannot be resumed (None: it can be)."""
    from infinity.tiers.run_files import missing_states, read_record

    foreign = next((file.foreign for file in files if file.foreign is not None), None)
    if foreign is not None:
        return None, f"cannot be resumed: {foreign}"
    path = next((file.path for file in files if file.is_record), None)
    if path is None:
        return None, "its record is on another path"
    try:
        record = read_record(path)
        if not record.generations:
            return None, "the run has ended; its next start removes the states"
        step = int(record.generations[0].state["counters"]["global_steps"])
        missing = missing_states(record, _directories(record, path.parent))
    except CheckpointError:
        return None, "its record is damaged"
    return step, f"{missing[0]} is missing, unless its drive is mounted elsewhere now" if missing else None


def _directories(record: Record, first: Path) -> list[Path]:
    """Return the directories of a run's states. The first one has the record; it may be mounted elsewhere now."""
    paths = [stripe.path for stripe in record.stripes]
    return [first if path == paths[0] else path for path in paths]
