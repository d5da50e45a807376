"""A plugin of pytest for `deepspeed_suite.py`: writes down what became of each test, and starts ranks quickly."""

from __future__ import annotations

import json
import os
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch

from infinity.integrations.dialect.accelerator import Accelerator

_LOG = Path(os.environ["SUITE_LOG"])
_DONE = set(json.loads(os.environ["SUITE_DONE"]))

if os.environ["SUITE_WITHOUT_BF16"] == "1":
    Accelerator.is_bf16_supported = lambda self: False  # type: ignore[method-assign]
    Accelerator.supported_dtypes = lambda self: [torch.float32, torch.float16]  # type: ignore[method-assign]


def pytest_configure(config: Any) -> None:
    # The tests start their ranks from a fork server: one that has torch imported saves seconds for each.
    set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest", "deepspeed", __name__, "unit.common"])


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
