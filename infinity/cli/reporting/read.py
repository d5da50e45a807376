"""Reads the log of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.config.read import read_text
from infinity.config.typed import Amount, Count, Rate, Real, parsed
from infinity.config.values import shown
from infinity.errors import ConfigError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunLines:
    """The last run of a log, from its start without --resume.

    Attributes:
        about: its first line; empty if the file has only steps.
        steps: the steps in order. If a step was repeated after a resume, the last one counts.
        evaluations: the same for evaluations.
        resumed: steps before which the run was resumed.
    """

    about: Row
    steps: list[Row]
    evaluations: list[Row]
    resumed: list[int]


def read_log(path: Path) -> RunLines:
    """Read the last run of a file that `infinity train --log` has written or `--json` has printed.

    An incomplete last line is left out: its process was killed, or is still writing.

    Raises:
        ConfigError: the file cannot be read, has a line of another format, or has no step.
    """
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
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
            if resumed:
                resumed[-1] = min(resumed[-1], row["step"])
            steps[row["step"]] = row
    if not steps:
        raise ConfigError(f"{path} has no step of training: give a file that `infinity train --log` has written")
    return RunLines(
        about, [steps[step] for step in sorted(steps)], [evaluations[s] for s in sorted(evaluations)], resumed
    )


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = parsed(dict[str, Any], line)
        parsed(_Begun if "run" in row else _Evaluation if "eval_loss" in row else _Step, line)
    except ValueError as error:
        raise ConfigError(
            f"{path}:{number} is no line of `infinity train --log` ({error}): {shown(line[:60])}"
        ) from error
    return row


# Schema of a line, see [Note: typed records] #


@dataclass(frozen=True)
class _Run:
    resume: Any = None
    model: str | None = None
    timeline: str | None = None


@dataclass(frozen=True)
class _Begun:
    run: _Run


@dataclass(frozen=True)
class _Evaluation:
    step: Count
    eval_loss: Real | None


@dataclass(frozen=True)
class _Level:
    used_bytes: Amount
    peak_bytes: Amount
    capacity_bytes: Amount


@dataclass(frozen=True)
class _Step:
    step: Count
    step_s: Rate
    tokens_per_s: Amount
    loss: Real | None = None
    lr: Real | None = None
    grad_norm: Real | None = None
    skipped: bool = False
    forward_s: Amount = 0.0
    backward_s: Amount = 0.0
    update_s: Amount = 0.0
    stall_s: dict[str, Amount] = field(default_factory=dict)
    nvme_read_bytes: Amount = 0
    nvme_write_bytes: Amount = 0
    host_to_device_bytes: Amount = 0
    device_to_host_bytes: Amount = 0
    peak_host_bytes: Amount = 0
    peak_device_bytes: Amount = 0
    tiers: dict[str, _Level] = field(default_factory=dict)
