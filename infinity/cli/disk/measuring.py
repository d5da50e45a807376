"""Measures one setting on every path, alone and all at once."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from infinity.cli.disk.job import Job
from infinity.cli.disk.results import Facts, fio_facts, run_facts, setting_facts, show, show_together
from infinity.cli.progress import Progress
from infinity.errors import ConfigError
from infinity.io import Span
from infinity.io.bench import BenchRun, BenchSession, run_together
from infinity.io.drives import cautions, drive_of
from infinity.io.fio import FioJob, fio_engine, fio_huge_page_bytes, run_fio
from infinity.io.pages import huge_page_bytes
from infinity.io.patterns import written_share
from infinity.io.verify import verify


def measure(job: Job, files: Sequence[Path], buffers: Span) -> None:
    """Every operation on every file, then on all files at once; prints each as it is done."""
    progress = Progress()
    alone: dict[tuple[Path, str], float] = {}
    for file in files:
        for operation in job.operations:
            with BenchSession(file, job.size_bytes, job.backend, job.options, buffers) as session:
                measurement = _Measurement(job, file, operation, session, progress)
                try:
                    measurement.run()
                except BaseException:
                    measurement.show_partly()
                    raise
                finally:
                    progress.clear()
                alone[file, operation] = measurement.show()
    if len(files) > 1:
        for operation in job.operations:
            _measure_together(job, files, operation, buffers, {file: alone[file, operation] for file in files})


class _Measurement:
    """One operation on one path: our runs, and fio's in turn with them."""

    def __init__(self, job: Job, file: Path, operation: str, session: BenchSession, progress: Progress) -> None:
        self._job = job
        self._file = file
        self._operation = operation
        self._session = session
        self._progress = progress
        self._runs: list[BenchRun] = []
        self._fio_runs: list[BenchRun] = []
        self._verified_bytes: int | None = None
        self._fio_job = self._prepare_fio() if job.fio else None

    def run(self) -> None:
        """Do all of it; the longer of passes and runtime is settled by the first run, and the same for all."""
        passes, most = 1, self._job.most_passes(self._operation)
        self._step(0)
        if self._job.runtime_s:
            first = self._session.run(self._operation, self._job.runtime_s, most_passes=most)
            self._runs.append(first)
            passes = first.passes
            if self._fio_job is not None:
                self._turn_of_fio(passes)
        while len(self._runs) < self._job.runs:
            self._step(len(self._runs))
            self._one_round(passes)
        if self._job.verify and written_share(self._operation):
            self._verified_bytes = verify(self._session, self._operation)

    def _one_round(self, passes: int) -> None:
        """Both, in changing order, so that neither always finds what the other left behind."""
        turns = [self._our_turn] if self._fio_job is None else [self._our_turn, self._turn_of_fio]
        random.shuffle(turns)
        for turn in turns:
            turn(passes)

    def _our_turn(self, passes: int) -> None:
        self._runs.append(self._session.run(self._operation, passes=passes))

    def _turn_of_fio(self, passes: int) -> None:
        assert self._fio_job is not None
        self._fio_runs.append(run_fio(self._fio_job, passes))

    def _step(self, number: int) -> None:
        text = f"{self._file.parent} {self._operation}: run {number + 1} of {self._job.runs}"
        self._progress.show(text, number / self._job.runs)

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
        if job.huge_pages:
            self._check_huge_pages(fio_job)
        return fio_job

    def _check_huge_pages(self, fio_job: FioJob) -> None:
        """That fio's memory lies in them as ours does; it reads once for that."""
        ours = huge_page_bytes(self._session.buffers)
        theirs = fio_huge_page_bytes(replace(fio_job, operation="read", order=()))
        in_flight = self._job.options.queue_depth * self._job.options.block_size_bytes
        if not ours or theirs < in_flight // 2:
            raise ConfigError(
                f"--pages huge: fio has {theirs} bytes in huge pages where {in_flight} are in flight, and we {ours}; "
                "compare with --pages small (huge pages need /sys/kernel/mm/transparent_hugepage/enabled to be madvise "
                "or always, for fio glibc 2.35, and 4 MiB in flight)"
            )

    # Results #

    def show(self) -> float:
        """Print; returns the median rate."""
        facts = self._facts(self._runs)
        show(facts, self._job)
        return statistics.median(run.bytes_per_s for run in self._runs)

    def show_partly(self) -> None:
        """What was measured before an end that nobody planned; nothing if that is nothing."""
        rest = self._session.unfinished
        runs = self._runs or ([rest] if rest is not None and rest.nbytes else [])
        if runs:
            self._progress.clear()
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
            "huge_page_bytes": huge_page_bytes(self._session.buffers),
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


def _measure_together(job: Job, files: Sequence[Path], operation: str, buffers: Span, alone: dict[Path, float]) -> None:
    """All paths at once, each with an engine of its own: what striping over them will give."""
    # The fastest goes over its file as often as it did alone; the others in proportion, as striping gives them shares.
    seconds = job.runs * job.size_bytes / max(alone.values())
    if job.runtime_s:
        most = job.most_passes(operation)
        longest = float("inf") if most is None else seconds * most
        seconds = min(job.runtime_s * job.runs, longest)
    share = buffers.nbytes // len(files) // 4096 * 4096
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                BenchSession(
                    file,
                    job.size_bytes,
                    job.backend,
                    job.options,
                    Span(buffers.address + index * share, share, buffers.owner),
                )
            )
            for index, file in enumerate(files)
        ]
        began_s = time.monotonic()
        with Progress().following(f"{operation}: all paths", lambda: (time.monotonic() - began_s) / seconds):
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
    show_together(facts, job)


def together(runs: Sequence[BenchRun]) -> BenchRun:
    """Runs of one time as one; each has counted the processor time of the whole process."""
    longest = max(runs, key=lambda run: run.seconds)
    latencies = longest.latencies
    for run in runs:
        if run is not longest:
            latencies = latencies.plus(run.latencies)
    return BenchRun(
        longest.seconds,
        sum(run.nbytes for run in runs),
        longest.cpu_s,
        longest.passes,
        sum(run.blocks for run in runs),
        longest.user_s,
        longest.system_s,
        sum(run.caller_s or 0.0 for run in runs),
        latencies,
    )
