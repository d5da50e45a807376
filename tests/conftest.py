"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

# The test models are too small for threads: torch's would only wait for one another, at full speed. Subprocesses
# inherit the variable, which comes too late for the torch that is imported here.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# A shell that starts the suite in the background has it ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else runs on the machine.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

_DEVICE = Path(__file__).parent / "device"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The emulated device becomes its process's accelerator, so its tests run alone, by name: `make test-device`."""
    named = (Path(argument.split("::")[0]).resolve() for argument in config.args)
    if collection_path == _DEVICE and not any(path.is_relative_to(_DEVICE) for path in named):
        return True
    return None


def pytest_collection_finish() -> None:
    """What imports have left is no garbage: without it a collection, which many tests make, takes a tenth as long."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules report theirs as leaked when the process ends


@pytest.fixture
def ends_process_group() -> Iterator[None]:
    """For what initialises `torch.distributed` and leaves it so, as DeepSpeed's dialect and Lightning do."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _leaves_no_process_group() -> Iterator[None]:
    """A test that leaves one makes of the next engine in its worker one of several ranks: it fails, not the others."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left torch.distributed initialised")
