"""A small filesystem, to be filled without harm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 3 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a filesystem needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)
