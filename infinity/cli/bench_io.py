"""`infinity bench-io`: measure drives through the I/O engine."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.cli.arguments import check_file, path_argument, size_argument
from infinity.cli.terminal import unwind_on_signals

if TYPE_CHECKING:
    from infinity.cli.disk.job import Job
    from infinity.io import Span


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench-io",
        help="measure a drive as training uses it",
        description="Block size, queue depth, threads, backend and O_DIRECT are by default those of training.",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--path", type=path_argument, action="append", help="directory on the drive; several are also measured at once"
    )
    what.add_argument(
        "--size", type=size_argument, default=1 << 30, help="bytes of the file on each path (default 1GiB)"
    )
    what.add_argument(
        "--op", action="append", help="read, write, mixed, randread or randwrite (default: the first three)"
    )
    what.add_argument("--runs", type=int, default=3, help="measured runs of each (default 3)")
    what.add_argument(
        "--runtime",
        type=float,
        help="seconds of a run, in whole passes (default: one pass; 3 with --compare-fio, 0.5 with --sweep)",
    )
    what.add_argument("--verify", action="store_true", help="at the end, write once more, read back and compare")
    what.add_argument(
        "--max-write", type=size_argument, help="write no more bytes than this (default for --sweep 64GiB)"
    )
    how = parser.add_argument_group("how blocks are moved")
    how.add_argument("--config", type=path_argument, help="take settings and paths from this configuration (JSON)")
    how.add_argument("--block-size", type=size_argument, help="bytes of one system call (training's default 1MiB)")
    how.add_argument("--queue-depth", type=int, help="blocks in flight (training's default 32)")
    how.add_argument("--threads", type=int, help="threads of the backends `threads` and `aiofiles`")
    how.add_argument("--backend", help="auto, io_uring, threads or aiofiles")
    how.add_argument("--sqpoll", action="store_true", help="io_uring: a kernel thread takes the requests")
    how.add_argument("--iopoll", action="store_true", help="io_uring: poll the drive instead of interrupts")
    how.add_argument("--buffered", action="store_true", help="use the page cache, without O_DIRECT")
    how.add_argument(
        "--pages",
        choices=("huge", "small"),
        help="pages of the buffers (default huge; beside fio only if it has them, too)",
    )
    fio = parser.add_argument_group("comparison with fio")
    fio.add_argument("--compare-fio", action="store_true", help="run fio in turn: same file, bytes and memory")
    fio.add_argument("--fio-engine", choices=("io_uring", "libaio", "psync"), help="default: the backend's counterpart")
    sweep = parser.add_argument_group("search for the best setting")
    sweep.add_argument("--sweep", action="store_true", help="measure block sizes and queue depths")
    sweep.add_argument("--resume", type=path_argument, help="store all measurements in this file, and continue from it")
    sweep.add_argument("--plot", type=path_argument, help="draw bandwidth against block size and depth (PNG)")
    sweep.add_argument("--write-config", type=path_argument, help="write the best setting to this JSON file")
    parser.add_argument("--json", action="store_true", help="one JSON line a result on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return the exit code."""
    unwind_on_signals()
    from infinity.cli.disk.job import job_of

    job = job_of(args)
    if args.sweep:
        _run_sweeps(job, args)
    else:
        _run_once(job)
    return 0


def _run_once(job: Job) -> None:
    from infinity.cli.disk.measuring import measure
    from infinity.config import format_size
    from infinity.io.bench import ring_bytes
    from infinity.memory.filled import random_memory

    for operation in job.operations:
        job.most_passes(operation)  # raises if --max-write is too small
    least = "at least " if job.runtime_s else ""
    print(f"writes {least}{format_size(job.least_written_bytes())}", file=sys.stderr)
    with ExitStack() as stack:
        buffers = stack.enter_context(
            random_memory(ring_bytes(job.options) * len(job.paths), huge_pages=job.huge_pages)
        )
        files, filled_s = _files(job, buffers, stack)
        if job.runtime_s:
            about = job.written_bytes_at(job.fill_bytes() / filled_s)
            print(f"writes about {format_size(about)} in runs of {job.runtime_s:g} s", file=sys.stderr)
        measure(job, files, buffers)


def _run_sweeps(job: Job, args: argparse.Namespace) -> None:
    from infinity.cli.disk.sweeping import Sweeps, plot_all, sweep_memory_bytes, write_config
    from infinity.cli.plots import check_matplotlib
    from infinity.memory import available_memory_bytes
    from infinity.memory.filled import random_memory

    if args.plot:
        check_matplotlib("--plot")
        check_file("--plot", args.plot)
    if args.write_config:
        check_file("--write-config", args.write_config)
    sweeps = Sweeps(job, args.resume, sweep_memory_bytes(available_memory_bytes()))
    sweeps.announce()
    with ExitStack() as stack:
        buffers = stack.enter_context(random_memory(sweeps.ring_bytes, huge_pages=job.huge_pages))
        files, _ = _files(job, buffers, stack)
        found = sweeps.run(files, buffers)
    if args.plot:
        plot_all(args.plot, found)
    if args.write_config:
        write_config(args.write_config, found, job.options)


def _files(job: Job, buffers: Span, stack: ExitStack) -> tuple[list[Path], float]:
    """Create a file on every path, and write each block once. Return the files and the seconds that this took."""
    from infinity.cli.progress import Progress
    from infinity.io.bench import BenchSession, bench_file

    files = [stack.enter_context(bench_file(path, job.size_bytes)) for path in job.paths]
    start_s = time.perf_counter()
    for file in files:
        with (
            BenchSession(file, job.size_bytes, job.backend, job.options, buffers) as session,
            Progress().following(f"writing {file}", lambda s=session: s.moved_bytes / job.size_bytes),  # type: ignore[misc]
        ):
            session.fill()
    return files, time.perf_counter() - start_s
