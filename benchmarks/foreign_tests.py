"""The tests of another project, run by pytest a file at a time, with infinity as their DeepSpeed."""

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
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infinity.cli.terminal import unwind_on_signals
from infinity.integrations.as_deepspeed import FOLDER

HERE = Path(__file__).parent
GRACE_S = 60  # beyond a test's limit, to import and to end
MOST_RUNS = 40  # of one file, each of which ends at a test that hangs


@dataclass(frozen=True)
class Suite:
    """How a project's tests are run.

    Attributes:
        root: where they run, and what their names begin at.
        plugins: of pytest, by module, beside the one that writes outcomes down.
        paths: of modules, before this folder and `root`.
        environment: beside this process's own.
        options: of pytest.
        limit_s: after which a test hangs.
    """

    root: Path
    plugins: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    limit_s: int = 60


def run_file(suite: Suite, file: Path) -> Iterator[dict[str, Any]]:
    """What became of each test of a file. A run ends at a test that hangs; another one goes on behind it."""
    done: set[str] = set()
    for _ in range(MOST_RUNS):
        log = Path(tempfile.mkstemp(suffix=".jsonl")[1])
        try:
            output, finished = _pytest(suite, file, log, done)
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
                yield {"test": str(file.relative_to(suite.root)), "outcome": "failed", "why": why}
            return


def _pytest(suite: Suite, file: Path, log: Path, done: set[str]) -> tuple[str, bool]:
    """What a run has printed, and whether it came to its end."""
    path = os.pathsep.join(map(str, (FOLDER, *suite.paths, HERE.parent, HERE, suite.root)))
    environment = os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "SUITE_LOG": str(log),
        "SUITE_DONE": json.dumps(sorted(done)),
        **suite.environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts="]
    command += [part for plugin in ("stand_ins.outcomes", *suite.plugins) for part in ("-p", plugin)]
    command += suite.options
    command += ["--rootdir", str(suite.root), "--tb=short", "-W", "ignore", str(file)]
    with tempfile.TemporaryFile("w+") as printed:
        # In a session of its own, whose processes end with it: a test that hangs may leave some that wait for ever.
        run = subprocess.Popen(
            command, cwd=suite.root, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _wait(run, log, suite.limit_s + GRACE_S)
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


def parser_of(doc: str | None, *, limit_s: int) -> argparse.ArgumentParser:
    """What every such suite takes, by its module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="files whose path has this")
    parser.add_argument("--ranks", type=int, default=2, help="processes of a test at most")
    parser.add_argument("--limit", type=int, default=limit_s, help="seconds after which a test hangs")
    parser.add_argument("--verbose", action="store_true", help="print each test that failed, with its cause")
    parser.add_argument("--json", action="store_true")
    return parser


def run(suite: Suite, files: list[Path], *, verbose: bool) -> list[dict[str, Any]]:
    """The results of all files; how each went, and with `verbose` what failed, on standard error."""
    results = []
    with _unwinding():
        for file in files:
            found = list(run_file(suite, file))
            results += found
            counts = Counter(result["outcome"] for result in found)
            print(file.relative_to(suite.root), dict(counts), file=sys.stderr, flush=True)
            for result in found if verbose else ():
                if result["outcome"] == "failed":
                    print("   ", result["test"].partition("::")[2], "|", result["why"], file=sys.stderr, flush=True)
    return results


@contextlib.contextmanager
def _unwinding() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise an exception: pytest's session, which they do not reach, ends with this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    unwind_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
