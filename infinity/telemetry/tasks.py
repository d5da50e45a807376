"""Processes and threads, as Linux tells of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A process or a thread.

    Attributes:
        name: of its program, or its own; at most 15 characters.
        state: one letter; S for one that waits, Z and X for one that has ended.
        started: when, in ticks since the machine was; identifiers are used again.
    """

    name: str
    state: str
    started: int


def read_task(directory: Path) -> Task:
    """Read `/proc/PID`, or `/proc/PID/task/TID`.

    Raises:
        OSError: there is none, or no /proc.
        ValueError, IndexError: it is told in another way than Linux does.
    """
    name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")  # names may have parentheses
    fields = rest.split()
    return Task(name, fields[0], int(fields[19]))
