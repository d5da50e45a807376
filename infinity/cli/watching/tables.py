"""Shows runs as lines of text that fit a terminal: one row for each run, or the details of one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.cli.progress import clock
from infinity.cli.terminal import plain
from infinity.config import format_size
from infinity.telemetry.status import RunStatus

_GAP = "  "
_BAR_WIDTH = 20
_COMMAND_WIDTH = 24
_LEAST_WAIT = 0.005  # waits below this share of a step are not shown


@dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        rank: priority: if space is short, the columns with the lowest ranks are shown.
        left: align to the left, for text.
    """

    title: str
    rank: int
    cell: Callable[[RunStatus], str]
    left: bool = False


def table(runs: Sequence[RunStatus], columns: int) -> list[str]:
    """Return a line of titles and one line for each run, with as many columns as fit."""
    cells = {column.title: [column.title, *(plain(column.cell(run)) for run in runs)] for column in _COLUMNS}
    widths = {title: max(len(cell) for cell in column) for title, column in cells.items()}
    shown: set[str] = set()
    room = columns
    for column in sorted(_COLUMNS, key=lambda column: column.rank):
        needed = widths[column.title] + (len(_GAP) if shown else 0)
        if needed <= room:
            shown.add(column.title)
            room -= needed
    lines = []
    for row in range(len(runs) + 1):
        parts = []
        for column in _COLUMNS:
            if column.title in shown:
                cell = cells[column.title][row]
                width = widths[column.title]
                parts.append(cell.ljust(width) if column.left else cell.rjust(width))
        lines.append(_GAP.join(parts).rstrip())
    return lines


def details(run: RunStatus, columns: int) -> list[str]:
    """Return all details of a run as lines."""
    facts = run.facts
    lines = [
        f"pid {run.pid}  rank {facts.get('rank', 0)} of {facts.get('ranks', 1)}  {_state(run)}{_phase(run)}  up "
        f"{clock(time.time() - facts['began_unix_s'])}",
        f"  {' '.join(facts['command'])}  in {facts['directory']}",
        "  " + _GAP.join(part for part in _figures(run) if part),
    ]
    for name, level in sorted(facts.get("tiers", {}).items()):
        share = min(1.0, _share_of(level))
        gauge = f"{'#' * round(_BAR_WIDTH * share):.<{_BAR_WIDTH}}"
        used = f"{format_size(level['used_bytes'])} of {format_size(level['capacity_bytes'])}"
        peak = f"  at most {format_size(level['peak_bytes'])} so far" if name != "nvme" else ""
        lines.append(f"  {name:<7}[{gauge}] {share:4.0%}  {used}{peak}")
    for drive in facts.get("drives", ()):
        rates = _GAP.join(f"{name} {format_size(drive[f'{name}_bytes_per_s'])}/s" for name in ("read", "write"))
        lines.append(f"  {', '.join(drive['paths'])}: {rates}")
    flight = facts.get("in_flight")
    if flight:
        lines.append(
            f"  in flight: {format_size(flight['read_bytes'])} to read, {format_size(flight['write_bytes'])} to write"
        )
    lines.append(f"  waits: {_waits(facts, most=9)}{_waiting(facts)}")
    lines = [plain(line) for line in lines]
    return [line if len(line) <= columns else line[: columns - 3] + "..." for line in lines]


def _figures(run: RunStatus) -> list[str]:
    facts = run.facts
    return [
        f"step {_step(run)}",
        _named("loss", facts.get("loss"), ".4f"),
        _named("", facts.get("step_s"), ".2f", " s/step"),
        _named("", facts.get("tokens_per_s"), ".0f", " tokens/s"),
        _named("lr", facts.get("lr"), ".2e"),
        _named("norm", facts.get("grad_norm"), ".3g"),
        f"skipped {facts['skipped_steps']}" if facts.get("skipped_steps") else "",
    ]


def _named(name: str, value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{name} {value:{form}}{unit}".strip()


# Cells #


def _number(key: str, form: str) -> Callable[[RunStatus], str]:
    def cell(run: RunStatus) -> str:
        value = run.facts.get(key)
        return "-" if value is None else f"{value:{form}}"

    return cell


def _state(run: RunStatus) -> str:
    if not run.alive:
        return "gone"
    return f"silent for {run.age_s:.0f} s" if run.silent else "runs"


def _phase(run: RunStatus) -> str:
    return f" ({run.facts['phase']})" if run.alive and run.facts.get("phase") else ""


def _step(run: RunStatus) -> str:
    steps = run.facts.get("steps")
    return f"{run.facts.get('step', 0)}" + (f"/{steps}" if steps else "")


def _tokens(run: RunStatus) -> str:
    value = run.facts.get("tokens_per_s")
    return "-" if value is None else f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _share_of(level: Mapping[str, int]) -> float:
    return level["used_bytes"] / max(1, level["capacity_bytes"])


def _level(tier: str, shown: Callable[[Mapping[str, int]], str]) -> Callable[[RunStatus], str]:
    def cell(run: RunStatus) -> str:
        level = run.facts.get("tiers", {}).get(tier)
        return "-" if level is None else shown(level)

    return cell


def _percent(level: Mapping[str, int]) -> str:
    return f"{_share_of(level):.0%}"


def _gib(level: Mapping[str, int]) -> str:
    return f"{level['used_bytes'] / (1 << 30):.2f}"


def _drives(which: str) -> Callable[[RunStatus], str]:
    def cell(run: RunStatus) -> str:
        drives = run.facts.get("drives")
        return f"{sum(drive[f'{which}_bytes_per_s'] for drive in drives) / 1e9:.2f}" if drives else "-"

    return cell


def _flight(run: RunStatus) -> str:
    flight = run.facts.get("in_flight")
    return "-" if not flight else f"{(flight['read_bytes'] + flight['write_bytes']) / (1 << 20):.0f}"


def _waits_cell(run: RunStatus) -> str:
    return _state(run) if not run.alive or run.silent else _waits(run.facts, most=1)


def _waits(facts: Mapping[str, Any], most: int) -> str:
    """Return the share of the last step that was spent waiting, and the main causes."""
    step_s = sum(facts.get("phase_s", {}).values())
    if not step_s:
        return "-"
    stalls = sorted(facts.get("stall_s", {}).items(), key=lambda item: -item[1])
    causes = [
        f"{cause.replace('_', ' ')} {seconds / step_s:.0%}"
        for cause, seconds in stalls[:most]
        if seconds >= _LEAST_WAIT * step_s
    ]
    return f"{sum(seconds for _, seconds in stalls) / step_s:.0%} {', '.join(causes)}".strip()


def _waiting(facts: Mapping[str, Any]) -> str:
    waiting = facts.get("waiting")
    return f"; now for {waiting['cause'].replace('_', ' ')}, {waiting['for_s']:.1f} s" if waiting else ""


def _command(run: RunStatus) -> str:
    text = " ".join(run.facts["command"])
    return text if len(text) <= _COMMAND_WIDTH else text[: _COMMAND_WIDTH - 3] + "..."


# In their order from the left. Sizes are in GiB and rates in GB/s, so that each cell is a number.
_COLUMNS = (
    _Column("pid", 0, lambda run: str(run.pid)),
    _Column("rank", 5, lambda run: str(run.facts.get("rank", 0))),
    _Column("step", 0, _step),
    _Column("loss", 1, _number("loss", ".4f")),
    _Column("s/step", 2, _number("step_s", ".2f")),
    _Column("tokens/s", 8, _tokens),
    _Column("lr", 13, _number("lr", ".1e")),
    _Column("norm", 14, _number("grad_norm", ".3g")),
    _Column("device", 9, _level("device", _percent)),
    _Column("host", 4, _level("host", _percent)),
    _Column("host GiB", 11, _level("host", _gib)),
    _Column("nvme GiB", 10, _level("nvme", _gib)),
    _Column("read", 6, _drives("read")),
    _Column("write", 7, _drives("write")),
    _Column("MiB in flight", 12, _flight),
    _Column("waits", 3, _waits_cell, left=True),
    _Column("command", 9, _command, left=True),
)
