"""Measures one setting on each path alone, and on all paths at once."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from infinity.cli.disk.job import Job
from infinity.cli.disk.results import Facts, all_latencies, fio_facts, run_facts, setting_facts, show
from infinity.cli.progress import Progress
from infinity.errors import ConfigError
from infinity.io import Span
from infinity.io.bench import BenchRun, BenchSession, ring_bytes, run_together, shares
from infinity.io.drives import cautions, drive_of
from infinity.io.fio import FioJob, fio_engine, fio_huge_page_bytes, run_fio
from infinity.io.pages import huge_page_bytes
from infinity.io.patterns import written_share
from infinity.io.verify import verify
from infinity.memory.filled import random_memory

_WARM_UP_SHARE = 1 / 3  # of `--runtime`; the rate of the warm-up gives the number of passes
_MARGIN = 1.2  # factor on the passes, so that a run that is faster than the warm-up is long enough


def measure(job: Job, files: Sequence[Path], buffers: Span) -> None:
    """Measure every operation on every file, then on all files at once. Print each result when it is known."""
    turns = _Turns(job)
    alone: dict[tuple[Path, str], float] = {}
    with turns.progress.following("", turns.share):
        for file in files:
            for operation in job.operations:
                alone[file, operation] = _measure_alone(job, file, operation, buffers, turns)
        if len(files) > 1:
            for operation in job.operations:
                rates = {file: alone[file, operation] for file in files}
                _measure_together(job, files, operation, buffers, rates, turns)


def _measure_alone(job: Job, file: Path, operation: str, buffers: Span, turns: _Turns) -> float:
    """Measure one operation on one path. Return the median rate in bytes per second."""
    with _session(job, file, buffers, turns) as session:
        measurement = _Measurement(job, file, operation, session, turns)
        try:
            measurement.run()
        except BaseException:
            turns.progress.clear()
            measurement.show_partly()
            raise
        return measurement.show()


def _session(job: Job, file: Path, buffers: Span, turns: _Turns) -> BenchSession:
    return BenchSession(
        file, job.size_bytes, job.backend, job.options, buffers, others_cpu_s=lambda: turns.progress.cpu_s
    )


class _Turns:
    """Progress of the whole command, in turns; turns of all kinds are assumed to take equally long."""

    def __init__(self, job: Job) -> None:
        runs = job.runs * (2 if job.fio else 1) + (1 if job.runtime_s else 0)
        verified = sum(1 for operation in job.operations if job.verify and written_share(operation))
        together = len(job.operations) if len(job.paths) > 1 else 0
        self._total = len(job.paths) * (runs * len(job.operations) + verified) + together * job.runs
        self._done = 0.0
        self._share: Callable[[], float] = lambda: 0.0
        self._weight = 1.0
        self.progress = Progress()

    def share(self) -> float:
        """Return the share of the command that is done, 0 to 1."""
        return self._done + self._weight * min(1.0, self._share()) / self._total

    @contextmanager
    def turn(self, text: str, share: Callable[[], float], weight: float = 1.0) -> Iterator[None]:
        """Count the context as a turn. `share` returns the part of the turn that is done, 0 to 1."""
        self.progress.say(text)
        self._weight, self._share = weight, share
        yield
        self._share = lambda: 0.0
        self._done += weight / self._total

    @contextmanager
    def timed_turn(self, text: str, seconds: float, weight: float = 1.0) -> Iterator[None]:
        """Count the context as a turn that takes about this long."""
        began_s = time.monotonic()
        with self.turn(text, lambda: (time.monotonic() - began_s) / seconds, weight):
            yield


class _Measurement:
    """Measures one operation on one path: runs of infinity, and in turn with them runs of fio."""

    def __init__(self, job: Job, file: Path, operation: str, session: BenchSession, turns: _Turns) -> None:
        self._job = job
        self._file = file
        self._operation = operation
        self._session = session
        self._turns = turns
        self._runs: list[BenchRun] = []
        self._fio_runs: list[BenchRun] = []
        self._verified_bytes: int | None = None
        self._huge_page_bytes = huge_page_bytes(session.buffers)
        self._fio_job = self._prepare_fio() if job.fio else None

    def run(self) -> None:
        """Run a warm-up that determines the passes of `--runtime`, then the measured runs, then `--verify`."""
        passes = self._passes()
        while len(self._runs) < self._job.runs:
            self._one_round(passes)
        if self._job.verify and written_share(self._operation):
            with self._turns.timed_turn(self._text("verify"), 3 * self._runs[-1].seconds / passes):
                self._verified_bytes = verify(self._session, self._operation)

    def _passes(self) -> int:
        """Return the passes of every run, ours and fio's: about `--runtime`, within the limit of writes, at least 1."""
        seconds, most = self._job.runtime_s, self._job.most_passes(self._operation)
        if not seconds:
            return 1
        with self._turns.timed_turn(self._text("warm-up"), _WARM_UP_SHARE * seconds):
            first = self._session.run(self._operation, _WARM_UP_SHARE * seconds, most_passes=most)
        wanted = math.ceil(_MARGIN * seconds * first.passes / first.seconds)
        return wanted if most is None else min(wanted, most)

    def _one_round(self, passes: int) -> None:
        """Run infinity and fio once each, in random order, so that neither is always measured after the other."""
        turns = [self._our_turn] if self._fio_job is None else [self._our_turn, self._turn_of_fio]
        random.shuffle(turns)
        number = f"run {len(self._runs) + 1} of {self._job.runs}"
        for turn in turns:
            turn(passes, number)

    def _our_turn(self, passes: int, number: str) -> None:
        with self._memory_as_fio_has_it() as session:
            begin_bytes, nbytes = session.moved_bytes, passes * session.pass_bytes(self._operation)
            with self._turns.turn(self._text(number), lambda: (session.moved_bytes - begin_bytes) / nbytes):
                self._runs.append(session.run(self._operation, passes=passes))

    @contextmanager
    def _memory_as_fio_has_it(self) -> Iterator[BenchSession]:
        """In a comparison with fio, use memory that is allocated for this run, as fio does: with adjacent physical
        pages, a drive sees fewer segments for each block, which changes the rate by up to half."""
        if self._fio_job is None:
            yield self._session
            return
        before = self._session
        with (
            random_memory(ring_bytes(self._job.options), huge_pages=self._fio_job.huge_pages) as buffers,
            _session(self._job, self._file, buffers, self._turns) as session,
        ):
            self._session = session  # so that `show_partly` finds the run that an interrupt ends
            self._huge_page_bytes = huge_page_bytes(buffers)
            yield session
            self._session = before

    def _turn_of_fio(self, passes: int, number: str) -> None:
        assert self._fio_job is not None
        seconds = self._runs[-1].seconds if self._runs else max(1.0, self._job.runtime_s)
        with self._turns.timed_turn(self._text(f"{number}, fio"), seconds):
            self._fio_runs.append(run_fio(self._fio_job, passes))

    def _text(self, what: str) -> str:
        return f"{self._operation}: {what}, {self._file.parent}"

    def _prepare_fio(self) -> FioJob:
        job, session = self._job, self._session
        fio_job = FioJob(
            self._file,
            job.size_bytes,
            "rw" if self._operation == "mixed" else self._operation,
            job.options,
            fio_engine(session.backend, job.fio_engine),
            session.moves("mixed") if self._operation == "mixed" else (),
            session.registered,
            job.huge_pages,
        )
        return replace(fio_job, huge_pages=job.huge_pages and self._has_huge_pages(fio_job))

    def _has_huge_pages(self, fio_job: FioJob) -> bool:
        """Whether fio's buffers are in huge pages like ours. Runs fio once, with reads."""
        ours, in_flight = self._huge_page_bytes, self._job.options.queue_depth * self._job.options.block_size_bytes
        with self._turns.timed_turn(self._text("fio's memory"), 1.0, 0.0):
            theirs = fio_huge_page_bytes(replace(fio_job, operation="read", order=()))
        if ours and theirs >= in_flight // 2:
            return True
        if self._job.pages_by_name:
            raise ConfigError(
                f"--pages huge: fio has {theirs} bytes in huge pages where {in_flight} are in flight, and we {ours}; "
                "compare with --pages small (huge pages need /sys/kernel/mm/transparent_hugepage/enabled to be madvise "
                "or always, for fio glibc 2.35, and 4 MiB in flight)"
            )
        return False

    # Results #

    def show(self) -> float:
        """Print the result. Return the median rate in bytes per second."""
        facts = self._facts(self._runs)
        show(facts, self._job)
        return statistics.median(run.bytes_per_s for run in self._runs)

    def show_partly(self) -> None:
        """Print what was measured before an interrupt or an error, if anything."""
        rest = self._session.unfinished
        runs = self._runs or ([rest] if rest is not None and rest.nbytes else [])
        if runs:
            show({**self._facts(runs), "interrupted": True}, self._job)

    def _facts(self, runs: Sequence[BenchRun]) -> Facts:
        drive = drive_of(self._file.parent)
        facts: Facts = {
            "path": str(self._file.parent),
            "filesystem": drive.filesystem,
            "device": drive.device,
            "op": self._operation,
            **setting_facts(self._job.options, self._session.backend),
            "size_bytes": self._job.size_bytes,
            "direct": self._session.direct,
            "registered_buffers": self._session.registered,
            "huge_page_bytes": self._huge_page_bytes,
            "buffer_bytes": self._session.window_bytes,
            "warnings": cautions(drive, direct=self._session.direct),
            **run_facts(runs),
        }
        if self._verified_bytes is not None:
            facts["verified_bytes"] = self._verified_bytes
        pairs = min(len(self._runs), len(self._fio_runs))
        if self._fio_job is not None and pairs:
            facts |= fio_facts(self._runs[:pairs], self._fio_runs[:pairs], self._fio_job.command())
        return facts


def _measure_together(
    job: Job, files: Sequence[Path], operation: str, buffers: Span, alone: dict[Path, float], turns: _Turns
) -> None:
    """Measure all paths at once, each with its own I/O engine: the rate of striping over them."""
    # The fastest path takes as many passes as alone, the others in proportion to their rate, as in striping.
    seconds = job.runs * job.size_bytes / max(alone.values())
    if job.runtime_s:
        most = job.most_passes(operation)
        longest = float("inf") if most is None else seconds * most
        seconds = min(job.runtime_s * job.runs, longest)
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(_session(job, file, span, turns))
            for file, span in zip(files, shares(buffers, len(files)), strict=True)
        ]
        with turns.timed_turn(f"{operation}: all paths at once", seconds, job.runs):
            runs = run_together(sessions, operation, seconds)
        backend = sessions[0].backend
    places = [
        {"path": str(file.parent), "bytes_per_s": run.bytes_per_s, "alone_bytes_per_s": alone[file]}
        for file, run in zip(files, runs, strict=True)
    ]
    total = together(runs)
    drives = [drive_of(file.parent).number for file in files]
    shared = ["some paths are on one drive, which training gives one queue"] if len(set(drives)) < len(drives) else []
    facts = {
        "op": operation,
        **setting_facts(job.options, backend),
        "paths": places,
        "share_of_sum": total.bytes_per_s / sum(alone.values()),
        "warnings": shared,
        **run_facts([total]),
    }
    show(facts, job)


def together(runs: Sequence[BenchRun]) -> BenchRun:
    """Combine simultaneous runs into one. Each of them has counted the processor time of the whole process."""
    longest = max(runs, key=lambda run: run.seconds)
    return BenchRun(
        longest.seconds,
        sum(run.nbytes for run in runs),
        longest.cpu_s,
        longest.passes,
        sum(run.blocks for run in runs),
        longest.user_s,
        longest.system_s,
        sum(run.caller_s or 0.0 for run in runs),
        all_latencies(runs),
    )
