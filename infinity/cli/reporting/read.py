"""Reads the log of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunLines:
    """A run, from its last start that did not go on from an earlier one.

    Attributes:
        about: what its first line says; empty where the file has only steps.
        steps: in order; where a run has gone on from a checkpoint, a step counts as it was trained last.
        evaluations: the same.
        resumed: steps before which the run was begun again.
    """

    about: Row
    steps: list[Row]
    evaluations: list[Row]
    resumed: list[int]


def read_log(path: Path) -> RunLines:
    """The run of a file that `infinity train --log` has written, or of what `--json` has printed.

    A last line that is not whole is left out: its process was killed, or is about to write it.

    Raises:
        ConfigError: it cannot be read, a line is something else, or there is no step.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    about: Row = {}
    steps: dict[int, Row] = {}
    evaluations: dict[int, Row] = {}
    resumed: list[int] = []
    for number, line in enumerate(lines, 1):
        if number == len(lines) or not line.strip():
            continue
        row = _row(path, number, line)
        if "run" in row:
            if row["run"].get("resume") and about:
                resumed.append(max(steps, default=0) + 1)
            else:
                about, steps, evaluations, resumed = row["run"], {}, {}, []
        elif "eval_loss" in row:
            evaluations[row["step"]] = row
        else:
            if steps and row["step"] <= max(steps) and resumed:
                resumed[-1] = min(resumed[-1], row["step"])
            steps[row["step"]] = row
    if not steps:
        raise ConfigError(f"{path} has no step of training: give a file that `infinity train --log` has written")
    return RunLines(
        about, [steps[step] for step in sorted(steps)], [evaluations[s] for s in sorted(evaluations)], resumed
    )


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if "run" in row:
            known = isinstance(row["run"], dict)
        else:
            known = isinstance(row["step"], int) and ("eval_loss" in row or isinstance(row["step_s"], (int, float)))
        if known:
            return dict(row)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path}:{number} is no line of `infinity train --log`: {line[:60]}")
