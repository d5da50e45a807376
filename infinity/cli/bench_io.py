"""`infinity bench-io`: what a drive gives through the I/O engine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.config import parse_size
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.io.bench import BenchResult


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("bench-io", help="measure the disk through the I/O engine")
    parser.add_argument("--path", type=Path, action="append", help="directory on the drive; repeat for several")
    parser.add_argument("--size", type=_size, default=1 << 30, help="bytes to move in a run (default 1GiB)")
    parser.add_argument("--block-size", type=_size, default=1 << 20, help="bytes of one system call (default 1MiB)")
    parser.add_argument("--queue-depth", type=int, default=32, help="blocks in flight (default 32)")
    parser.add_argument("--threads", type=int, default=8, help="of the thread backend (default 8)")
    parser.add_argument("--backend", default="auto", help="auto, io_uring, threads or aiofiles")
    parser.add_argument("--op", action="append", help="read, write, mixed or randread (default: the first three)")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON line a result on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    import torch  # noqa: PLC0415  (torch takes seconds, which `infinity --help` must not)

    from infinity.io import IoOptions  # noqa: PLC0415
    from infinity.io.bench import BenchJob, BenchResult, run_bench  # noqa: PLC0415
    from infinity.memory import Arena  # noqa: PLC0415

    for name in ("queue_depth", "threads", "runs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    options = IoOptions(args.block_size, args.queue_depth, args.threads)
    arena = Arena(max(64 << 20, 64 * args.block_size))
    if not args.json:
        print(_HEADER)
    with arena.lease(arena.capacity_bytes) as lease:
        lease.tensor(torch.uint8).random_()  # a drive that compresses must not be flattered
        for path in args.path or [Path()]:
            for operation in args.op or ["read", "write", "mixed"]:
                job = BenchJob(path, args.size, operation, args.backend, options)
                done = 0
                for outcome in run_bench(job, args.runs, lease.span()):
                    if isinstance(outcome, BenchResult):
                        _show(outcome, json_lines=args.json)
                    else:
                        done += 1
                        _show_progress(f"{path} {operation}: run {done} of {args.runs}")
    arena.close()
    return 0


_HEADER = (
    f"{'path':<20} {'op':<9} {'backend':<9} {'GB/s median':>11} {'min':>6} {'max':>6} "
    f"{'CPU s/GB':>9} {'p50 ms':>7} {'p99 ms':>7}"
)
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(result: BenchResult, *, json_lines: bool) -> None:
    rates = sorted(run.bytes_per_s for run in result.runs)
    cpu = statistics.median(run.cpu_s / (run.nbytes / 1e9) for run in result.runs)
    if json_lines:
        job = result.job
        line = {
            "path": str(job.path),
            "op": job.operation,
            "backend": result.backend,
            "direct": result.direct,
            "size_bytes": job.size_bytes,
            "block_size_bytes": job.options.block_size_bytes,
            "queue_depth": job.options.queue_depth,
            "bytes_per_s": {"median": statistics.median(rates), "min": rates[0], "max": rates[-1]},
            "cpu_s_per_gb": cpu,
            "latency_s": {name: result.percentile(share) for name, share in _PERCENTILES.items()},
        }
        print(json.dumps(line), flush=True)
        return
    _show_progress("")
    gigabytes = [rate / 1e9 for rate in (statistics.median(rates), rates[0], rates[-1])]
    print(
        f"{result.job.path!s:<20} {result.job.operation:<9} {result.backend:<9} {gigabytes[0]:>11.2f} "
        f"{gigabytes[1]:>6.2f} {gigabytes[2]:>6.2f} {cpu:>9.3f} "
        f"{result.percentile(0.5) * 1e3:>7.2f} {result.percentile(0.99) * 1e3:>7.2f}"
    )
    if not result.direct:
        print(f"  note: {result.job.path} has no direct I/O here; this is the page cache, not the drive")
