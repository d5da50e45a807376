"""A slice of the soak benchmark: 2 GB of random extents, every byte verified."""

from __future__ import annotations

import json

import pytest

from infinity.io import probe_backends
from tests import prepared

NATIVE = [status.name for status in probe_backends() if status.available and status.name != "aiofiles"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", NATIVE)
def test_random_extents_hold_what_was_written(backend, tmp_path) -> None:
    options = ["--path", tmp_path, "--backend", backend, "--total", "1GB", "--size", "64MiB"]
    done = prepared.run([prepared.ROOT / "benchmarks" / "io_soak.py", *options], timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] >= 10**9
    assert not list(tmp_path.iterdir())
