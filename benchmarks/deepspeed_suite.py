"""DeepSpeed's own unit tests, of a checkout of its repository, with infinity as their DeepSpeed.

    python benchmarks/deepspeed_suite.py --tests DeepSpeed/tests --json
    python benchmarks/deepspeed_suite.py --tests DeepSpeed/tests --only tensor_fragment --verbose

The claim: scripts for DeepSpeed find what they call, and it does what its name says; what is not here says so. So every
test counts as passed, failed or skipped, with the first cause of what failed, and there is no floor: it counts, and
does not time. The tests run unchanged, on the CPU with gloo, on as many processes as they ask for up to `--ranks`.

Most take the best of bf16, fp16 and float32 that is there; some are of fp16 alone, and have inputs of that best one:
they need `--without-bf16`, which has the accelerator say that it has none.

Beside the tests themselves they need what DeepSpeed does, such as `hjson`; without it those that import it fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infinity.integrations.as_deepspeed import FOLDER

HERE = Path(__file__).parent
PLUGIN = "stand_ins.deepspeed_suite"
# What is no part of training with ZeRO on one machine: other devices, inference, other kinds of parallelism.
LEFT_OUT = (
    "accelerator",
    "autotuning",
    "autotp",
    "compile",
    "compression",
    "elasticity",
    "hybrid_engine",
    "inference",
    "launcher",
    "linear",
    "model_parallelism",
    "module_inject",
    "moe",
    "multimodal",
    "pipe",
    "profiling",
    "rollout",
    "sequence_parallelism",
    "tensor_parallel",
    "ulysses_alst",
    "zenflow",
)
GRACE_S = 60  # beyond a test's limit, to import and to end
MOST_RUNS = 40  # of one file, each of which ends at a test that hangs


def test_files(tests: Path, only: str) -> list[Path]:
    """The files of unit tests, without the folders that are left out."""
    files = sorted((tests / "unit").rglob("test_*.py"))
    if not files:
        raise SystemExit(f"{tests} has no unit/test_*.py: give the folder `tests` of a checkout of DeepSpeed")
    parts = {file: file.relative_to(tests / "unit").parts for file in files}
    return [file for file in files if only in str(file) and not set(LEFT_OUT) & set(parts[file])]


def run_file(
    tests: Path, file: Path, ranks: int, limit_s: int, *, without_bf16: bool = False
) -> Iterator[dict[str, Any]]:
    """What became of each test of a file. A run ends at a test that hangs; another one goes on behind it."""
    done: set[str] = set()
    for _ in range(MOST_RUNS):
        log = Path(tempfile.mkstemp(suffix=".jsonl")[1])
        try:
            output, finished = _pytest(tests, file, ranks, limit_s, log, done, without_bf16=without_bf16)
            lines = [json.loads(line) for line in log.read_text().splitlines()]
        finally:
            log.unlink()
        results = {line["test"]: line for line in lines if "outcome" in line}
        hung = [line["test"] for line in lines if "outcome" not in line and line["test"] not in results]
        yield from results.values()
        yield from ({"test": test, "outcome": "failed", "why": "the run ended in it (hung or killed)"} for test in hung)
        done |= results.keys() | set(hung)
        if finished:
            return
        if not hung:
            why = _last_error(output)
            if not done:
                yield {"test": str(file.relative_to(tests)), "outcome": "failed", "why": why}
            return


def _pytest(
    tests: Path, file: Path, ranks: int, limit_s: int, log: Path, done: set[str], *, without_bf16: bool
) -> tuple[str, bool]:
    """What a run has printed, and whether it came to its end."""
    path = os.pathsep.join(map(str, (FOLDER, HERE.parent, HERE, tests)))
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": str(ranks),
        "DS_UNITTEST_TIMEOUT": str(limit_s),
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "SUITE_LOG": str(log),
        "SUITE_DONE": json.dumps(sorted(done)),
        "SUITE_WITHOUT_BF16": str(int(without_bf16)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--rootdir", str(tests), "--tb=short", "-W", "ignore", str(file)]
    with tempfile.TemporaryFile("w+") as printed:
        # In a session of its own, whose processes end with it: a test that hangs may leave some that wait for ever.
        run = subprocess.Popen(
            command, cwd=tests, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _wait(run, log, limit_s + GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        printed.seek(0)
        output = printed.read()
    # 0: all passed, 1: some failed (or it gave up on a hanging test), 5: nothing was left to run.
    return output, code in (0, 1, 5) and "Test hanged" not in output


def _wait(run: subprocess.Popen[bytes], log: Path, limit_s: float) -> int | None:
    """The exit status of a run; None if it has written nothing down for too long."""
    size, since_s = -1, time.monotonic()
    while run.poll() is None:
        if log.stat().st_size != size:
            size, since_s = log.stat().st_size, time.monotonic()
        if time.monotonic() - since_s > limit_s:
            return None
        time.sleep(0.2)
    return run.returncode


def _last_error(output: str) -> str:
    """The line that says why a file could not be imported."""
    lines = [re.sub(r"^E +", "", line) for line in output.splitlines() if line.startswith("E  ")]
    return (lines or output.splitlines() or ["nothing was printed"])[-1][:200]


# What came out #


def table(results: list[dict[str, Any]]) -> str:
    """A row a file, and the causes of what failed by how many tests they hold."""
    by_file: dict[str, Counter[str]] = {}
    causes: Counter[tuple[str, str]] = Counter()
    for result in results:
        by_file.setdefault(result["test"].partition("::")[0], Counter())[result["outcome"]] += 1
        if "why" in result:
            causes[result["outcome"], result["why"]] += 1
    columns = ("passed", "failed", "skipped")
    lines = ["| file | " + " | ".join(columns) + " |", "|---" * 4 + "|"]
    for file, counts in sorted(by_file.items()):
        lines.append(f"| `{file}` | " + " | ".join(str(counts[column]) for column in columns) + " |")
    total = Counter(result["outcome"] for result in results)
    lines.append("| all | " + " | ".join(str(total[column]) for column in columns) + " |")
    lines += ["", "| tests | | first cause |", "|---|---|---|"]
    lines += [f"| {count} | {outcome} | {why.replace('|', '/')} |" for (outcome, why), count in causes.most_common()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a checkout of DeepSpeed")
    parser.add_argument("--only", default="", help="files whose path has this")
    parser.add_argument("--ranks", type=int, default=2, help="tests that need more processes are skipped")
    parser.add_argument("--limit", type=int, default=60, help="seconds after which a test hangs")
    parser.add_argument("--without-bf16", action="store_true", help="as on a device that has fp16 alone")
    parser.add_argument("--verbose", action="store_true", help="print each test that failed, with its cause")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = []
    for file in test_files(args.tests.absolute(), args.only):
        found = list(run_file(args.tests.absolute(), file, args.ranks, args.limit, without_bf16=args.without_bf16))
        results += found
        counts = Counter(result["outcome"] for result in found)
        print(file.relative_to(args.tests.absolute()), dict(counts), file=sys.stderr, flush=True)
        for result in found if args.verbose else ():
            if result["outcome"] == "failed":
                print("   ", result["test"].partition("::")[2], "|", result["why"], file=sys.stderr, flush=True)
    print(json.dumps(results) if args.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
