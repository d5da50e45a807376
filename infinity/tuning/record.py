"""The measurements of a search in a JSON file, from which it can continue after an interruption.

    {"format": "infinity-search", "version": 1, "asked": {...}, "machine": null or {...}, "spent_s": 93.1,
     "runs": [{"setting": {...}, "step_s": [2.1, ...], "init_s": 8.0, "took_s": 19.2, "stopped": false, "error": "",
               "peak_host_bytes": ..., "peak_process_bytes": ..., "written_bytes": ..., "at_s": 31.0}],
     "duels": [{"challenger": {...}, "holder": {...}, "ratios": [0.71, 0.69], "won": true, "why": ""}]}

`asked` has all that must be equal for measurements to be comparable; `at_s` is the search's time when a run ended.
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
        step_s: seconds of each measured step, without the warm-up.
        init_s: seconds before the first step.
        took_s: seconds from the start of the process to its end.
        stopped: whether it was ended early, because it could not win any more or the time was up.
        error: why it failed; empty if it did not.
        peak_host_bytes: peak of the ledger; `peak_process_bytes` is the process's, measured from outside.
        written_bytes: bytes written to the drives, including the warm-up and the initial values in swap files.
        at_s: the search's time when the run ended.
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
        """The median step; infinite if no step was measured."""
        return statistics.median(self.step_s) if self.step_s and not self.error else float("inf")

    def facts(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        return {**self.__dict__, "setting": self.setting.facts(), "step_s": list(self.step_s)}


@dataclass(frozen=True)
class Duel:
    """A comparison of a challenger with the holder, the fastest setting so far.

    Attributes:
        ratios: the challenger's median step divided by the holder's, of consecutive runs.
        why: the reason of the outcome, if there are no ratios.
    """

    challenger: Setting
    holder: Setting
    ratios: tuple[Amount, ...]
    won: bool
    why: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the duel as JSON values."""
        challenger, holder = self.challenger.facts(), self.holder.facts()
        return {**self.__dict__, "challenger": challenger, "holder": holder, "ratios": list(self.ratios)}


@dataclass
class Record:
    """The state of a search. `write` saves it if it has a path."""

    asked: Mapping[str, Any]
    path: Path | None = None
    machine: dict[str, Any] | None = None
    spent_s: float = 0.0
    runs: list[Run] = field(default_factory=list)
    duels: list[Duel] = field(default_factory=list)

    def holder(self, given: Setting) -> Setting:
        """Return the fastest setting so far; `given` if no challenger has won."""
        return next((duel.challenger for duel in reversed(self.duels) if duel.won), given)

    def runs_of(self, setting: Setting) -> list[Run]:
        """Return the runs of a setting that measured at least one step and did not fail."""
        return [run for run in self.runs if run.setting == setting and run.step_s and not run.error]

    def median_s(self, setting: Setting) -> float:
        """Return the median step of the setting's runs, without stopped ones if possible; infinite without runs."""
        runs = self.runs_of(setting)
        whole = [run.median_s for run in runs if not run.stopped] or [run.median_s for run in runs]
        return statistics.median(whole) if whole else float("inf")

    def ratios(self, one: Setting, other: Setting) -> list[float]:
        """Return the step time of `one` divided by that of `other`, for each pair of consecutive runs."""
        found: list[float] = []
        for duel in self.duels:
            if (duel.challenger, duel.holder) == (one, other):
                found += duel.ratios
            elif (duel.challenger, duel.holder) == (other, one):
                found += [1 / ratio for ratio in duel.ratios]
        return found

    def write(self) -> None:
        """Replace the file atomically.

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
    """Read the record of a search, to continue it.

    Raises:
        ConfigError: the file is no record, or a value of `asked` differs; the message says which.
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
                f"it was begun with another {', '.join(differing)}; to start again, remove it or give another --out"
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {path}: {error}") from error
    return Record(asked, path, found.machine, found.spent_s, found.runs, found.duels)


# Schema of the file, see [Note: typed records] #


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
