"""Processes and threads, as Linux shows them in /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """A process or a thread.

    Attributes:
        name: the thread's name, by default that of its program; at most 15 characters.
        state: one letter: S if it sleeps, Z or X if it has ended.
        started: start time in ticks since boot; it tells apart tasks that had the same number.
    """

    name: str
    state: str
    started: int


def read_task(directory: Path) -> Task:
    """Read `/proc/PID`, or `/proc/PID/task/TID`.

    Raises:
        OSError: the task or /proc does not exist.
        ValueError, IndexError: the file does not have Linux's format.
    """
    # The system cuts a name after 15 bytes, which may be in the middle of a character.
    text = (directory / "stat").read_text(encoding="utf-8", errors="replace")
    name, _, rest = text.partition("(")[2].rpartition(")")  # names may have parentheses
    fields = rest.split()
    return Task(name, fields[0], int(fields[19]))
