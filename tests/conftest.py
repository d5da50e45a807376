"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# The test models are too small for threads: torch's would only wait for one another. Subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell that starts the suite in the background has it ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

_DEVICE = Path(__file__).parent / "device"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The emulated device becomes its process's accelerator, so its tests run alone, by name: `make test-device`."""
    named = (Path(argument.split("::")[0]).resolve() for argument in config.args)
    if collection_path == _DEVICE and not any(path.is_relative_to(_DEVICE) for path in named):
        return True
    return None
