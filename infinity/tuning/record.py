"""What a search has measured so far, in one JSON file, so that it can go on after an interruption.

    {"format": "infinity-search", "version": 1, "asked": {...}, "machine": null or {...}, "spent_s": 93.1,
     "runs": [{"setting": {...}, "step_s": [2.1, ...], "init_s": 8.0, "took_s": 19.2, "stopped": false, "error": "",
               "peak_host_bytes": ..., "peak_process_bytes": ..., "written_bytes": ..., "at_s": 31.0}],
     "duels": [{"challenger": {...}, "holder": {...}, "ratios": [0.71, 0.69], "won": true, "why": ""}]}

`asked` is all that must be the same for figures to belong together; `at_s` is the time of the search when a run ended.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.config.read import read_text, write_json
from infinity.config.typed import Amount, Count, parsed
from infinity.errors import ConfigError
from infinity.tuning.space import Setting

_FORMAT = "infinity-search"
_VERSION = 1


@dataclass(frozen=True)
class Run:
    """One process that trained a few steps.

    Attributes:
        step_s: measured steps, those to warm up left out.
        init_s: until the first step.
        took_s: all of it, from the start of the process to its end.
        stopped: it was ended early, since it could not win any more, or the time was up.
        error: why it failed, in words; empty where it did not.
        peak_host_bytes: of the ledger; `peak_process_bytes` of the process, from outside.
        written_bytes: to the drives, steps to warm up and the swap files' first values included.
        at_s: time of the search when it ended.
    """

    setting: Setting
    step_s: tuple[Amount, ...] = ()
    init_s: Amount = 0.0
    took_s: Amount = 0.0
    stopped: bool = False
    error: str = ""
    peak_host_bytes: Count = 0
    peak_process_bytes: Count = 0
    written_bytes: Count = 0
    at_s: Amount = 0.0

    @property
    def median_s(self) -> float:
        """Infinite where nothing was measured."""
        return statistics.median(self.step_s) if self.step_s and not self.error else float("inf")

    def facts(self) -> dict[str, Any]:
        """As the file has it."""
        return {**self.__dict__, "setting": self.setting.facts(), "step_s": list(self.step_s)}


@dataclass(frozen=True)
class Duel:
    """A challenger against what was the best so far.

    Attributes:
        ratios: the challenger's median step over the holder's, of runs next to one another.
        why: in words, where there are no ratios.
    """

    challenger: Setting
    holder: Setting
    ratios: tuple[Amount, ...]
    won: bool
    why: str = ""

    def facts(self) -> dict[str, Any]:
        """As the file has it."""
        challenger, holder = self.challenger.facts(), self.holder.facts()
        return {**self.__dict__, "challenger": challenger, "holder": holder, "ratios": list(self.ratios)}


@dataclass
class Record:
    """A search so far; every change is written at once if it has a path."""

    asked: Mapping[str, Any]
    path: Path | None = None
    machine: dict[str, Any] | None = None
    spent_s: float = 0.0
    runs: list[Run] = field(default_factory=list)
    duels: list[Duel] = field(default_factory=list)

    def holder(self, given: Setting) -> Setting:
        """Who has won so far."""
        return next((duel.challenger for duel in reversed(self.duels) if duel.won), given)

    def runs_of(self, setting: Setting) -> list[Run]:
        """Those that measured something."""
        return [run for run in self.runs if run.setting == setting and run.step_s and not run.error]

    def median_s(self, setting: Setting) -> float:
        """Over its runs that came to their end; infinite without any."""
        runs = self.runs_of(setting)
        whole = [run.median_s for run in runs if not run.stopped] or [run.median_s for run in runs]
        return statistics.median(whole) if whole else float("inf")

    def ratios(self, one: Setting, other: Setting) -> list[float]:
        """Steps of `one` over those of `other`, of runs next to one another."""
        found: list[float] = []
        for duel in self.duels:
            if (duel.challenger, duel.holder) == (one, other):
                found += duel.ratios
            elif (duel.challenger, duel.holder) == (other, one):
                found += [1 / ratio for ratio in duel.ratios]
        return found

    def write(self) -> None:
        """Whole or not at all.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self.path is None:
            return
        facts = {
            "format": _FORMAT,
            "version": _VERSION,
            "asked": self.asked,
            "machine": self.machine,
            "spent_s": self.spent_s,
            "runs": [run.facts() for run in self.runs],
            "duels": [duel.facts() for duel in self.duels],
        }
        write_json(self.path, facts, "the search")


def read_record(path: Path, asked: Mapping[str, Any]) -> Record:
    """A search that was begun.

    Raises:
        ConfigError: it is none, or one of something else; the message says what differs.
    """
    try:
        text = read_text(path)
        head = parsed(_Head, text)
        if (head.format, head.version) != (_FORMAT, _VERSION):
            raise ValueError("it holds no search of this version")
        found = parsed(_Stored, text)
        differing = [key for key, value in asked.items() if found.asked.get(key) != json.loads(json.dumps(value))]
        if differing:
            raise ValueError(
                f"it was begun with another {', '.join(differing)}; remove it, or take another --out, to begin anew"
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {path}: {error}") from error
    return Record(asked, path, found.machine, found.spent_s, found.runs, found.duels)


# What the file may hold, see [Note: typed records] #


@dataclass(frozen=True)
class _Head:
    format: str = ""
    version: int = 0


@dataclass(frozen=True)
class _Stored:
    """See `Record`."""

    asked: dict[str, Any]
    machine: dict[str, Any] | None
    spent_s: Amount
    runs: list[Run]
    duels: list[Duel]
