"""Runs fio on the same work, to be compared with: same bytes and order, same memory, same way into the kernel."""

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
_REPLAYED = "file"  # what a log calls the file, whose own name may have blanks, which end a name there


@dataclass(frozen=True)
class FioJob:
    """The work of a session, for fio.

    Attributes:
        engine: fio's own; see `fio_engine`.
        order: what one pass does, where fio has no pattern of its own for it; empty otherwise. It is replayed from a
            log, with which fio cannot register its file.
        registered: buffers are registered with the kernel.
        huge_pages: buffers lie in huge pages, or not.
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
        """What is run; one without a log can be run again by hand."""
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
            "--scramble_buffers=0",  # or it spends processor time on changing what it writes, as we do not
            "--clat_percentiles=0",
            "--lat_percentiles=1",  # from fio's hands to the end, as ours
            "--output-format=json+",
        ]
        if self.engine == "io_uring":
            command.append(f"--fixedbufs={int(self.registered)}")
            command.append(f"--registerfiles={int(log is None)}")
            polling = (("sqthread_poll", options.sqpoll), ("hipri", options.iopoll))
            command += [f"--{name}=1" for name, on in polling if on]
        if log is not None:
            return [*command, f"--read_iolog={log}", "--replay_no_stall=1"]
        # Absolute, since fio is run in a directory of its own; a colon would begin the next of several names.
        name = str(self.path.absolute()).replace(":", "\\:")
        return [*command, f"--filename={name}", f"--rw={self.operation}", f"--loops={passes}", *self._shares()]

    def _shares(self) -> list[str]:
        """The file, whole; or in a part for each of the threads that engines of blocking calls need for any depth."""
        block = self.options.block_size_bytes
        blocks = self.size_bytes // block
        threads = min(self.options.queue_depth, self.options.threads, blocks)
        if self.engine != "psync" or threads == 1:
            return [f"--size={blocks * block}"]
        share = blocks // threads * block
        return [f"--size={share}", f"--offset_increment={share}", f"--numjobs={threads}", "--group_reporting"]


def fio_engine(backend: str, wanted: str | None = None) -> str:
    """The engine of fio to put beside a backend: its counterpart, or the one that is wanted.

    Raises:
        ConfigError: there is none.
    """
    if backend not in ENGINES:
        raise ConfigError(f"fio has nothing like the backend {backend}; compare {' or '.join(ENGINES)}")
    return wanted or ENGINES[backend]


def fio_version() -> str:
    """The installed fio's version.

    Raises:
        ConfigError: there is none.
    """
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed; install it (apt-get install fio) or leave --compare-fio out")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_fio(job: FioJob, passes: int = 1) -> BenchRun:
    """Whole passes of fio over an existing file.

    The processor seconds are those that fio counts for its jobs, without its start-up.

    Raises:
        ConfigError: fio is not installed or refuses; the message has its reason.
    """
    with _started(job, passes) as fio:
        return _result(_facts(*fio, job, passes), job, passes)


def fio_huge_page_bytes(job: FioJob) -> int:
    """Most of fio's memory that is seen in huge pages during one pass of a job.

    Raises:
        ConfigError: as `run_fio`.
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
    """fio under way, and the file that it will write its results into."""
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
                    stdout=subprocess.DEVNULL,  # it would draw its own progress over ours
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
                child.terminate()  # it ends its jobs, which a kill would leave behind
            child.__exit__(None, None, None)  # waits, and closes what it wrote to


def _facts(child: subprocess.Popen[str], output: Path, job: FioJob, passes: int) -> dict[str, Any]:
    """What fio says of its jobs, once it is over.

    Raises:
        ConfigError: it failed; a line has its reason and a second one the command.
    """
    _, errors = child.communicate()
    text = output.read_text() if output.exists() else ""
    before, brace, _ = text.partition("{")  # warnings may stand before the JSON
    if child.returncode or not brace:
        reason = _reason([*errors.splitlines(), *before.splitlines()]) or f"it ended with {child.returncode}"
        raise ConfigError(f"fio failed: {reason}\nto see all that it says: {shlex.join(job.command(passes))}")
    facts: dict[str, Any] = json.loads(text[len(before) :])["jobs"][0]
    return facts


def _reason(lines: Sequence[str]) -> str:
    """Of what fio said, the line that names an error of the system, or else the first; empty if it said nothing."""
    said = [line.strip() for line in lines if line.strip()]
    return next((line for line in said if "error=" in line or "error:" in line), said[0] if said else "")


def _replay_log(job: FioJob, passes: int) -> str:
    """The order in fio's words, a line a block.

    It must not close the file: what is in flight then would not be waited for.
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
        raise ConfigError("fio was over in less than a millisecond: use a larger --size")
    # In a replay fio forgets to count the bytes that are in flight when the log ends, though it waits for them.
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
