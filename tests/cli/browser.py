"""Chromium without a window and without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND")


def in_chromium(page: Path, profile: Path, *options: str) -> str:
    """Open a page; returns what is printed. Skips the test where Chromium is not installed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    command = [chromium, *_OPTIONS, f"--user-data-dir={profile}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
