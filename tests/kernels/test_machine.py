"""How many threads the kernels take of a machine that others use, too."""

from __future__ import annotations

import pytest

from infinity import kernels
from infinity.kernels import machine


@pytest.mark.parametrize(
    ("cpus", "allowed", "processes", "launches", "threads"),
    [
        (16, 16, 1, False, 16),
        (16, 16, 1, True, 14),
        (16, 16, 8, True, 2),
        (96, 96, 8, True, 10),
        (2, 2, 1, True, 2),  # where there are so few, those that launch take turns with the others
        (2, 2, 2, False, 1),
        (2, 2, 8, True, 1),
        (96, 12, 8, True, 10),  # bound to its own
        (64, 4, 1, False, 4),  # a container's
    ],
)
def test_a_share_of_the_machine(cpus, allowed, processes, launches, threads) -> None:
    assert machine._share(cpus, allowed, processes, launches=launches) == threads


def test_what_somebody_has_set_stays(monkeypatch) -> None:
    monkeypatch.setattr(machine, "_chosen", False)
    kernels.share_threads(10_000, launches=False)
    assert kernels.thread_count() == 1
    kernels.set_threads(3)
    kernels.share_threads(10_000, launches=False)
    assert kernels.thread_count() == 3
