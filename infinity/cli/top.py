"""`infinity top`: show the present state of this user's runs on this machine."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence

from infinity.cli.terminal import plain
from infinity.cli.watching.tables import details, table
from infinity.errors import ConfigError
from infinity.telemetry.status import PERIOD_S, RunStatus, read_runs

_PIPE_COLUMNS = 160  # if standard output is no terminal


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch the runs on this machine: steps, tiers, drives, and what they wait for",
        description="Shows every run of this user on this machine, scripts that use the Python API included. Ctrl-C "
        "ends it.",
    )
    parser.add_argument(
        "run_name", nargs="?", metavar="RUN", help="details of one run: its pid, or a part of its command"
    )
    parser.add_argument("--once", action="store_true", help="print once, instead of an updated display")
    parser.add_argument("--json", action="store_true", help="print everything once, as one JSON line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the runs. Return the exit code."""
    if args.json:
        print(json.dumps([_facts(status) for status in _chosen(args.run_name)]))
        return 0
    if args.once or not sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
        print("\n".join(_lines(args.run_name, columns)))
        return 0
    return _watch(args.run_name)


def _watch(name: str | None) -> int:
    """Draw on the terminal's alternate screen until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)

    def picture() -> Text:
        lines = _lines(name, console.width)
        shown = lines[: console.height - 1]
        if len(shown) < len(lines):
            shown[-1] = f"... {len(lines) - len(shown) + 1} more lines: give RUN, or a higher terminal"
        return Text("\n".join(shown), no_wrap=True, overflow="crop")

    _chosen(name)  # raises before the screen is switched
    try:
        with Live(get_renderable=picture, console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.refresh()
                time.sleep(PERIOD_S)
    except KeyboardInterrupt:
        return 0


def _lines(name: str | None, columns: int) -> list[str]:
    strange: list[str] = []
    runs = read_runs(strange)
    notes = [plain(line)[:columns] for line in strange]
    if name is not None:
        return [line for run in _called(runs, name) for line in details(run, columns)] or [f"{name} has ended"]
    if not runs:
        return ["no training of this user runs on this machine (or tiering.status is false)", *notes]
    return [*table(runs, columns), *notes]


def _chosen(name: str | None) -> list[RunStatus]:
    """Return the runs of this name; all runs for None. Raises ConfigError if there is none."""
    runs = read_runs()
    if name is None:
        return runs
    found = _called(runs, name)
    if not found:
        there = ", ".join(f"{run.pid} ({' '.join(run.facts['command'])[:40]})" for run in runs) or "none"
        raise ConfigError(f"no run is called {name}; there are: {there}")
    return found


def _called(runs: Sequence[RunStatus], name: str) -> list[RunStatus]:
    """Return the living runs with this pid or in whose command the name occurs; ended ones if none lives."""
    if name.isdigit():
        found = [run for run in runs if run.pid == int(name)]
    else:
        found = [run for run in runs if name in " ".join(run.facts["command"])]
    return [run for run in found if run.alive] or found


def _facts(run: RunStatus) -> dict[str, object]:
    return {**run.facts, "age_s": run.age_s, "alive": run.alive, "silent": run.alive and run.silent}
