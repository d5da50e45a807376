"""The benchmark of a step on a GPU runs on the emulated one, which no profiler of torch sees."""

from __future__ import annotations

import json
from pathlib import Path

from tests import prepared
from tests.device import target

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


@target.emulated_only
def test_a_step_is_measured(tmp_path) -> None:
    command = [SCRIPT, "--device", "simdev", "--systems", "infinity,fsdp2"]
    command += ["--clip", "1.0", "--warmup", "1", "--steps", "2"]
    command += ["--json", "--into", str(tmp_path), "--name", "try"]
    done = prepared.run(command)
    assert done.returncode == 0, done.stderr + done.stdout
    results = json.loads(done.stdout)
    ours, fsdp2 = results["rows"]
    assert ours["tokens"] == results["shape"]["batch"] * results["shape"]["seq"]
    assert ours["step_s"] > 0
    assert ours["tflop_per_s"] == 6 * ours["params"] * ours["tokens"] / ours["step_s"] / 1e12
    assert ours["losses"][-1] < ours["losses"][0]
    assert ours["profile"] is None
    assert fsdp2 == {"system": "fsdp2", "missing": "not here: needs a real device"}
    (written,) = tmp_path.glob("gpu_step_try_simdev_*.json")
    assert json.loads(written.read_text()) == results
