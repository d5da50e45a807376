"""The log of a run, which `infinity report` reads: a line of JSON for its start, and for each step and evaluation."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.training.progress import Evaluation, StepReport

_log = logging.getLogger(__name__)


class RunLog:
    """Appends to a file. If that fails, the log ends with a warning, and training continues.

    Args:
        about: facts of the run, for its first line.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        try:
            self._file: IO[str] | None = path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--log {path} cannot be written: {error.strerror}") from error
        self._write({"run": {**about, "began_unix_s": time.time()}})

    def step(self, report: StepReport) -> None:
        """Write a line for a finished step."""
        tiers = {name: asdict(level) for name, level in report.tiers.items()}
        self._write({**report.facts(), "tiers": tiers, "unix_s": time.time()})

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write a line for an evaluation."""
        self._write({**evaluation.facts(), "unix_s": time.time()})

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, facts: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(facts) + "\n")
        except OSError as error:
            _log.warning("--log %s cannot be written; later steps are not logged: %s", self._path, error)
            self._file = None
