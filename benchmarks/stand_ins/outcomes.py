"""A plugin of pytest for `foreign_tests.py`: writes down what became of each test; leaves out those that are done."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_LOG = Path(os.environ["SUITE_LOG"])
_DONE = set(json.loads(os.environ["SUITE_DONE"]))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items[:] = [item for item in items if item.nodeid not in _DONE]


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid})


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _write({"test": report.nodeid, "outcome": report.outcome} | _why(report))


def _why(report: Any) -> dict[str, str]:
    if report.outcome == "passed":
        return {}
    if report.outcome == "skipped":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        return {"why": text.removeprefix("Skipped: ")}
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).splitlines()
    if crash is None:  # not in a test, but in what it needs
        lines = [line[1:].strip() for line in lines if line.startswith("E ")] or lines
    return {"why": next((line for line in lines if line.strip()), "it says nothing")[:200]}


def _write(line: dict[str, str]) -> None:
    with _LOG.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
