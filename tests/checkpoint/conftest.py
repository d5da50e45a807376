"""A small filesystem, to be filled without harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.behaviour.disks import mounted


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MiB."""
    with mounted(tmp_path / "small", "size=3m") as path:
        yield path
