"""Runs fio on the same work, for comparison: same bytes and order, same memory, same kernel interface."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity.errors import ConfigError
from infinity.io.bench import BenchRun
from infinity.io.interface import IoOptions
from infinity.io.latency import Histogram, Latencies
from infinity.io.pages import child_huge_page_bytes, huge_pages_for_children
from infinity.io.patterns import Move

ENGINES = {"io_uring": "io_uring", "threads": "psync"}
_LOOK_EVERY_S = 0.05
_REPLAYED = "file"  # the file's name in a log: its own name may have blanks, which end a name in a log


@dataclass(frozen=True)
class FioJob:
    """The work of a session, for fio.

    Attributes:
        engine: an engine of fio, see `fio_engine`.
        order: the requests of one pass, if fio has no pattern for them; else empty. fio replays them from a log; it
            cannot register its file then.
        registered: buffers are registered with the kernel.
        huge_pages: whether buffers are in huge pages.
    """

    path: Path
    size_bytes: int
    operation: str
    options: IoOptions
    engine: str
    order: Sequence[Move] = ()
    registered: bool = True
    huge_pages: bool = False

    def command(self, passes: int = 1, log: Path | None = None) -> list[str]:
        """Return the command line; one without a log can be run again by hand."""
        options = self.options
        depth = options.queue_depth if self.engine != "psync" else 1
        command = [
            "fio",
            "--name=bench",
            f"--bs={options.block_size_bytes}",
            f"--iodepth={depth}",
            f"--ioengine={self.engine}",
            f"--direct={int(options.direct)}",
            "--randrepeat=0",
            "--scramble_buffers=0",  # otherwise fio spends processor time on changes of the data
            "--clat_percentiles=0",
            "--lat_percentiles=1",  # from submission to completion, like infinity's latencies
            "--output-format=json+",
        ]
        if self.engine == "io_uring":
            command.append(f"--fixedbufs={int(self.registered)}")
            command.append(f"--registerfiles={int(log is None)}")
            polling = (("sqthread_poll", options.sqpoll), ("hipri", options.iopoll))
            command += [f"--{name}=1" for name, on in polling if on]
        if log is not None:
            return [*command, f"--read_iolog={log}", "--replay_no_stall=1"]
        # Absolute, since fio runs in its own directory; a colon would separate two names.
        name = str(self.path.absolute()).replace(":", "\\:")
        return [*command, f"--filename={name}", f"--rw={self.operation}", f"--loops={passes}", *self._shares()]

    def _shares(self) -> list[str]:
        """Return the arguments for the file as a whole, or for one part per thread if the engine's calls block."""
        block = self.options.block_size_bytes
        blocks = self.size_bytes // block
        threads = min(self.options.queue_depth, self.options.threads, blocks)
        if self.engine != "psync" or threads == 1:
            return [f"--size={blocks * block}"]
        share = blocks // threads * block
        return [f"--size={share}", f"--offset_increment={share}", f"--numjobs={threads}", "--group_reporting"]


def fio_engine(backend: str, wanted: str | None = None) -> str:
    """Return the fio engine to compare with a backend: `wanted`, or the backend's counterpart.

    Raises:
        ConfigError: there is none.
    """
    if backend not in ENGINES:
        raise ConfigError(f"fio has nothing like the backend {backend}; compare {' or '.join(ENGINES)}")
    return wanted or ENGINES[backend]


def fio_version() -> str:
    """Return the installed fio's version.

    Raises:
        ConfigError: fio is not installed.
    """
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed; install it (apt-get install fio) or leave --compare-fio out")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(job: FioJob, passes: int = 1) -> BenchRun:
    """Run whole passes of fio over an existing file.

    The processor seconds are fio's count for its jobs, without its start-up.

    Raises:
        ConfigError: fio is not installed or refuses; the message has its reason.
    """
    with _started(job, passes) as fio:
        return _result(_facts(*fio, job, passes), job, passes)


def fio_huge_page_bytes(job: FioJob) -> int:
    """Return the most of fio's memory that was seen in huge pages during one pass of a job.

    Raises:
        ConfigError: like `run_fio`.
    """
    seen = 0
    with _started(job, passes=1) as (child, output):
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_EVERY_S)
            seen = max(seen, child_huge_page_bytes(child.pid))
        _facts(child, output, job, passes=1)
    return seen


@contextlib.contextmanager
def _started(job: FioJob, passes: int) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start fio; yield it, and the path of its results."""
    with tempfile.TemporaryDirectory(prefix="infinity-fio-") as directory:
        output = Path(directory) / "output.json"
        log = Path(directory) / "order.log" if job.order else None
        if log is not None:
            (Path(directory) / _REPLAYED).symlink_to(job.path.absolute())
            log.write_text(_replay_log(job, passes))
        command = [*job.command(passes, log), f"--output={output}"]
        with huge_pages_for_children(job.huge_pages) as environment:
            try:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # its own progress display would overwrite ours
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=directory,
                    env=environment,
                )
            except FileNotFoundError as error:
                raise ConfigError("fio is not installed; install it or leave the comparison out") from error
        try:
            yield child, output
        finally:
            if child.poll() is None:
                child.terminate()  # it ends its jobs, which would survive a kill
            child.__exit__(None, None, None)  # waits, and closes its pipes


def _facts(child: subprocess.Popen[str], output: Path, job: FioJob, passes: int) -> dict[str, Any]:
    """Wait for fio, and return the results of its jobs. The message of an error ends with the command."""
    _, errors = child.communicate()
    text = output.read_text() if output.exists() else ""
    before, brace, _ = text.partition("{")  # warnings may precede the JSON
    if child.returncode or not brace:
        reason = _reason([*errors.splitlines(), *before.splitlines()]) or f"it ended with {child.returncode}"
        raise ConfigError(f"fio failed: {reason}\nto see its full output: {shlex.join(job.command(passes))}")
    facts: dict[str, Any] = json.loads(text[len(before) :])["jobs"][0]
    return facts


def _reason(lines: Sequence[str]) -> str:
    """Return the output line that names a system error, else the first line; empty without output."""
    said = [line.strip() for line in lines if line.strip()]
    return next((line for line in said if "error=" in line or "error:" in line), said[0] if said else "")


def _replay_log(job: FioJob, passes: int) -> str:
    """Return the order as a log of fio, one line for each block.

    The log must not close the file: fio would not wait for requests in flight.
    """
    block = job.options.block_size_bytes
    lines = [
        f"{_REPLAYED} {move.operation} {offset} {block}"
        for move in job.order
        for offset in range(move.offset, move.offset + move.nbytes, block)
    ]
    return "\n".join(["fio version 2 iolog", f"{_REPLAYED} add", f"{_REPLAYED} open", *lines * passes, ""])


def _result(facts: dict[str, Any], job: FioJob, passes: int) -> BenchRun:
    read, write = facts["read"], facts["write"]
    seconds = max(read["runtime"], write["runtime"]) / 1e3
    if not seconds:
        raise ConfigError("fio ended in less than a millisecond: use a larger --size")
    # In a replay fio does not count the bytes in flight at the end of the log, although it waits for them.
    planned_bytes = sum(move.nbytes for move in job.order) * passes
    nbytes = planned_bytes or read["io_bytes"] + write["io_bytes"]
    busy_s = facts["job_runtime"] / 1e3 / 100
    user_s, system_s = facts["usr_cpu"] * busy_s, facts["sys_cpu"] * busy_s
    return BenchRun(
        seconds,
        nbytes,
        user_s + system_s,
        passes,
        blocks=nbytes // job.options.block_size_bytes,
        user_s=user_s,
        system_s=system_s,
        latencies=Latencies(_histogram(read), _histogram(write)),
    )


def _histogram(facts: dict[str, Any]) -> Histogram:
    bins = facts["lat_ns"].get("bins", {})
    return Histogram(tuple((int(ns) / 1e9, count) for ns, count in bins.items()))
