"""A slice of the soak benchmark: 2 GB of random extents, every byte verified."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.io import probe_backends

ROOT = Path(__file__).parents[2]
NATIVE = [status.name for status in probe_backends() if status.available and status.name != "aiofiles"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", NATIVE)
def test_random_extents_hold_what_was_written(backend, tmp_path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "io_soak.py"), "--path", str(tmp_path), "--backend", backend]
    done = subprocess.run(
        [*command, "--total", "1GB", "--size", "64MiB"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] >= 10**9
    assert not list(tmp_path.iterdir())
