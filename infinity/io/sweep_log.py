"""A file with the measurements of sweeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.config.read import read_text
from infinity.config.typed import Count, Positive, Rate, parsed
from infinity.errors import ConfigError
from infinity.io.interface import IoOptions
from infinity.io.sweep_plan import SweepPlan, shape_of

_VERSION = 2


class SweepLog:
    """Measurements of sweeps in a file of JSON lines, so that an interrupted sweep can continue.

    Args:
        path: created if it is missing; None stores no measurement.
        facts: conditions that must be equal for measurements to be comparable.

    Raises:
        ConfigError: the file has other conditions, or cannot be read or written.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._measured: list[_Measured] = []
        self.written_bytes = 0
        header = {"infinity_sweep": _VERSION, **facts}
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self._read(path, header)
            else:
                self._append(header)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"--resume {path}: {error}") from error

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        text = read_text(path)
        found = json.loads(next(iter(text.splitlines()), ""))
        if not isinstance(found, dict) or "infinity_sweep" not in found:
            raise ValueError("the file exists and holds no sweep: use another file")
        for name, value in header.items():
            if found.get(name) != value:
                raise ValueError(f"its sweep has {name} {found.get(name)}, this one has {value}: use another file")
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines()[1:], 2):
            try:
                self._take(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error

    def _take(self, line: str) -> None:
        self.written_bytes += parsed(_Written, line).written_bytes
        if "bytes_per_s" in parsed(dict[str, Any], line):
            self._measured.append(parsed(_Measured, line))

    def rates(self, place: str, plan: SweepPlan, options: IoOptions, *, final: bool) -> tuple[float, ...]:
        """Return earlier measurements: the final ones, in turn with the default, or the others."""
        wanted = (place, plan.operation, plan.pass_bytes, *shape_of(options), final)
        return tuple(each.bytes_per_s for each in self._measured if each.conditions == wanted)

    def pass_bytes(self, place: str, operation: str) -> int | None:
        """Return the bytes of the file that earlier measurements used; None if there are none."""
        return next((each.pass_bytes for each in self._measured if (each.path, each.op) == (place, operation)), None)

    def add(
        self, place: str, plan: SweepPlan, options: IoOptions, rate: float, written_bytes: int, *, final: bool
    ) -> None:
        """Add a measurement."""
        block, depth = shape_of(options)
        self._append(
            {
                "path": place,
                "op": plan.operation,
                "pass_bytes": plan.pass_bytes,
                "block_size_bytes": block,
                "queue_depth": depth,
                "final": final,
                "bytes_per_s": rate,
                "written_bytes": written_bytes,
            }
        )

    def filled(self, nbytes: int) -> None:
        """Add the bytes that were written to fill a file for measurements."""
        self._append({"written_bytes": nbytes})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class _Written:
    """Type of a line of the log, see [Note: typed records]; older lines do not have the written bytes."""

    written_bytes: Count = 0


@dataclass(frozen=True)
class _Measured:
    path: str
    op: str
    pass_bytes: Positive
    block_size_bytes: Positive
    queue_depth: Positive
    final: bool
    bytes_per_s: Rate

    @property
    def conditions(self) -> tuple[str, str, int, int, int, bool]:
        """The values that must be equal for measurements to be repetitions of each other."""
        return self.path, self.op, self.pass_bytes, self.block_size_bytes, self.queue_depth, self.final
