"""Settings of the whole suite."""

from __future__ import annotations

import os

# The test models are too small for threads: torch's would only wait for one another. Subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
