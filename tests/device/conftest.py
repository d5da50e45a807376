"""Every test here runs in a process whose accelerator is the emulated one, or the real one that target.py names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import target

_PROBLEM = target.problem()
if _PROBLEM is None:
    target.prepare()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _PROBLEM is not None:
            item.add_marker(pytest.mark.skipif(True, reason=_PROBLEM), append=False)  # the first reason counts
        elif not target.EMULATED:  # a warning is an error in these tests
            item.add_marker(pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"))


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    """Each test has the device as it is by default; the emulated one checks that there is no race."""
    if not target.EMULATED:
        yield
        torch.accelerator.synchronize()
        return
    with target.configured(check=1):
        before = target.counts()["races"]
        yield
        torch.accelerator.synchronize()
        assert target.counts()["races"] == before, "the host touched the memory of a copy that was not done"
