"""Benchmarks start, and count what becomes of other projects' tests. What they measure takes minutes, elsewhere."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests import prepared

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file for file in FOLDER.glob("*.py") if "__main__" in file.read_text())
TESTS = """
import time
import pytest

def test_passes():
    import deepspeed
    assert deepspeed.__infinity__

def test_fails():
    raise ValueError("by its own doing")

@pytest.mark.skip("for no reason")
def test_is_skipped():
    pass

class TestHangs:
    def test_hangs(self):
        time.sleep(600)

def test_comes_behind_one_that_hangs():
    pass
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_says_what_it_takes(script) -> None:
    done = prepared.run([script, "--help"])
    assert (done.returncode, done.stdout.startswith(f"usage: {script.name} ")) == (0, True), done.stderr


def test_tests_of_others_are_counted_with_their_causes(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import foreign_tests  # noqa: PLC0415

    monkeypatch.setattr(foreign_tests, "GRACE_S", 8)
    (tmp_path / "test_small.py").write_text(TESTS)
    suite = foreign_tests.Suite(tmp_path, limit_s=0)
    found = foreign_tests.run(suite, [tmp_path / "test_small.py"], verbose=False)
    assert {result["test"].rpartition("::")[2]: (result["outcome"], result.get("why")) for result in found} == {
        "test_passes": ("passed", None),
        "test_fails": ("failed", "ValueError: by its own doing"),
        "test_is_skipped": ("skipped", "for no reason"),
        "test_hangs": ("failed", "the run ended in it (hung or killed)"),
        "test_comes_behind_one_that_hangs": ("passed", None),
    }
    assert "| `test_small.py` | 2 | 2 | 1 |" in foreign_tests.table(json.loads(json.dumps(found)))


def test_a_signal_ends_the_tests_of_others_too(tmp_path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "test_small.py").write_text(
        f"""
import os, pathlib, time

def test_hangs():
    new = pathlib.Path({str(pid)!r} + ".new")
    new.write_text(str(os.getpid()))
    new.rename({str(pid)!r})
    time.sleep(600)
"""
    )
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
import foreign_tests
root = Path({str(tmp_path)!r})
foreign_tests.run(foreign_tests.Suite(root), [root / "test_small.py"], verbose=False)
"""
    with prepared.Child(["-c", script]) as suite:
        until_s = time.monotonic() + 60
        while not pid.exists():
            assert suite.poll() is None
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.kill(suite.pid, signal.SIGTERM)
        assert suite.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_step_on_a_gpu_needs_one() -> None:
    done = prepared.run([FOLDER / "gpu_step.py", "--device", "cuda"])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "no accelerator: torch sees none on this machine\n"
