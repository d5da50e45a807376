"""Every test here runs in a process whose accelerator is the emulated one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import simdev

_PROBLEM = simdev.problem()
if _PROBLEM is None:
    simdev.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _PROBLEM is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=_PROBLEM))


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """Each test has the device as it is by default, with checks, and is to end without a race."""
    with simdev.configured(check=1):
        before = simdev.counts()["races"]
        yield
        torch.accelerator.synchronize()
        assert simdev.counts()["races"] == before, "the host touched the memory of a copy that was not done"
