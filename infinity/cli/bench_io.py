"""`infinity bench-io`: what a drive gives through the I/O engine."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from infinity.config import parse_size, with_values
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.io import IoOptions, Span
    from infinity.io.bench import BenchRun, BenchSession
    from infinity.io.sweep import SweepPoint

_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_DEFAULT_OPERATIONS = ("read", "write", "mixed")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("bench-io", help="measure the disk through the I/O engine")
    parser.add_argument("--path", type=Path, action="append", help="directory on the drive; repeat for several")
    parser.add_argument("--size", type=_size, default=1 << 30, help="bytes of the file (default 1GiB)")
    parser.add_argument("--block-size", type=_size, default=1 << 20, help="bytes of one system call (default 1MiB)")
    parser.add_argument("--queue-depth", type=int, default=32, help="blocks in flight (default 32)")
    parser.add_argument("--threads", type=int, default=8, help="of the thread backend (default 8)")
    parser.add_argument("--backend", default="auto", help="auto, io_uring, threads or aiofiles")
    parser.add_argument("--sqpoll", action="store_true", help="io_uring: a kernel thread takes the requests")
    parser.add_argument("--iopoll", action="store_true", help="io_uring: poll the drive instead of interrupts")
    parser.add_argument("--op", action="append", help="read, write, mixed or randread (default: the first three)")
    parser.add_argument("--runs", type=int, default=3, help="measured runs of each (default 3)")
    parser.add_argument("--runtime", type=float, default=0.0, help="seconds of a run (default: one pass over the file)")
    parser.add_argument("--compare-fio", action="store_true", help="run fio in turn with us on the same file")
    parser.add_argument("--sweep", action="store_true", help="find the best block size and queue depth")
    parser.add_argument("--plot", type=Path, help="with --sweep: draw bandwidth against block size and depth (PNG)")
    parser.add_argument("--write-config", type=Path, help="with --sweep: put the best setting into this JSON file")
    parser.add_argument("--json", action="store_true", help="one JSON line a result on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)
    import torch  # noqa: PLC0415  (torch takes seconds, which `infinity --help` must not)

    from infinity.io import IoOptions  # noqa: PLC0415
    from infinity.io.bench import BenchSession, bench_file, check_operation  # noqa: PLC0415
    from infinity.io.fio import fio_version  # noqa: PLC0415
    from infinity.memory import Arena  # noqa: PLC0415

    for name in ("queue_depth", "threads", "runs"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if not args.sweep and (args.plot or args.write_config):
        raise ConfigError("--plot and --write-config show what --sweep finds; add --sweep")
    operations = args.op or (["mixed"] if args.sweep else list(_DEFAULT_OPERATIONS))
    for operation in operations:
        check_operation(operation)
    if args.compare_fio:
        fio_version()  # missing is better said before a file is written than after
    options = IoOptions(args.block_size, args.queue_depth, args.threads, args.sqpoll, args.iopoll)
    arena = Arena(max(64 << 20, 16 * args.block_size))
    with arena.lease(arena.capacity_bytes) as lease:
        lease.tensor(torch.uint8).random_()  # a drive that compresses must not be flattered
        for path in args.path or [Path()]:
            with bench_file(path, args.size) as file:
                with BenchSession(file, args.size, args.backend, options, lease.span()) as session:
                    session.fill()
                for operation in operations:
                    if args.sweep:
                        _sweep(args, file, operation, options, lease.span())
                    else:
                        _measure(args, file, operation, options, lease.span())
    arena.close()
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """A signal ends the command as an exception would: its files are removed."""
    raise SystemExit(128 + number)


# One setting #


def _measure(args: argparse.Namespace, file: Path, operation: str, options: IoOptions, buffers: Span) -> None:
    from infinity.io.bench import BenchSession  # noqa: PLC0415
    from infinity.io.fio import run_fio  # noqa: PLC0415

    runs, fio_runs = [], []
    with BenchSession(file, args.size, args.backend, options, buffers) as session:
        for number in range(args.runs):
            _show_progress(f"{file.parent} {operation}: run {number + 1} of {args.runs}")
            runs.append(session.run(operation, args.runtime))
            if args.compare_fio:
                fio_runs.append(run_fio(file, args.size, operation, options, runtime_s=args.runtime))
        _show_progress("")
        result = _facts(file.parent, operation, options, session, runs)
        result["latency_s"] = _percentiles(session.latency_s(operation))
    if fio_runs:
        result["fio"] = _rates(fio_runs)
        result["fio_ratio"] = statistics.median(
            us.bytes_per_s / fio.bytes_per_s for us, fio in zip(runs, fio_runs, strict=True)
        )
    _show(result, json_lines=args.json)


def _rates(runs: Sequence[BenchRun]) -> dict[str, object]:
    rates = [run.bytes_per_s for run in runs]
    return {
        "bytes_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in runs),
    }


def _percentiles(latency_s: Sequence[float]) -> dict[str, float]:
    last = len(latency_s) - 1
    return {name: latency_s[min(last, int(share * len(latency_s)))] for name, share in _PERCENTILES.items()}


def _facts(
    path: Path, operation: str, options: IoOptions, session: BenchSession, runs: Sequence[BenchRun]
) -> dict[str, object]:
    return {
        "path": str(path),
        "op": operation,
        "backend": session.backend,
        "direct": session.direct,
        "block_size_bytes": options.block_size_bytes,
        "queue_depth": options.queue_depth,
        "warning": _cache_warning(path, direct=session.direct),
        **_rates(runs),
    }


def _cache_warning(path: Path, *, direct: bool) -> str:
    """What the numbers may be instead of the drive's; empty if nothing is suspected."""
    if not direct:
        return "no direct I/O here: this is the page cache, not the drive"
    device = path.stat().st_dev
    link = Path(f"/sys/dev/block/{device >> 8 & 0xFFF}:{device & 0xFF}")
    if link.exists() and link.resolve().name.startswith(("vd", "xvd")):
        return "a virtual disk: its host may cache, so compare ratios rather than trust the rates"
    return ""


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _show(result: dict[str, object], *, json_lines: bool) -> None:
    if json_lines:
        print(json.dumps(result), flush=True)
        return
    print(
        f"{result['op']}: {result['backend']}, {_block(result['block_size_bytes'])} x {result['queue_depth']}, "
        f"{result['path']}"
    )
    _show_rates("", result)
    latency = result["latency_s"]
    assert isinstance(latency, dict)
    print("  latency   " + "  ".join(f"{name} {value * 1e3:.2f} ms" for name, value in latency.items()))
    if "fio" in result:
        _show_rates("fio ", result["fio"])
        print(f"  ratio     {result['fio_ratio']:.3f} of fio, median of runs in turn")
    if result["warning"]:
        print(f"  note      {result['warning']}")


def _show_rates(whose: str, facts: object) -> None:
    assert isinstance(facts, dict)
    rates = {name: value / 1e9 for name, value in facts["bytes_per_s"].items()}
    print(
        f"  {whose + 'bw':<10}{rates['median']:.2f} GB/s (min {rates['min']:.2f}, max {rates['max']:.2f})"
        f"  cpu {facts['cpu_s_per_gb']:.3f} s/GB"
    )


def _block(nbytes: object) -> str:
    assert isinstance(nbytes, int)
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


# Every setting #


def _sweep(args: argparse.Namespace, file: Path, operation: str, options: IoOptions, buffers: Span) -> None:
    from infinity.io.sweep import best_point, sweep  # noqa: PLC0415

    points: tuple[SweepPoint, ...] = ()
    for progress in sweep(file, args.size, args.backend, operation, options, buffers):
        points = progress.points
        _show_progress(
            f"{file.parent} {operation}: {progress.done} of {progress.total}, "
            f"best so far {best_point(points).bytes_per_s / 1e9:.2f} GB/s"
        )
    _show_progress("")
    best = best_point(points)
    if args.json:
        for point in points:
            print(json.dumps({"path": str(file.parent), "op": operation, "best": point is best, **_setting(point)}))
    else:
        _show_table(f"{operation} on {file.parent}, GB/s", points, best)
    if args.plot:
        _plot(args.plot, f"{operation} on {file.parent}", points)
    if args.write_config:
        _write_config(args.write_config, best.options)


def _setting(point: SweepPoint) -> dict[str, object]:
    return {
        "block_size_bytes": point.options.block_size_bytes,
        "queue_depth": point.options.queue_depth,
        "bytes_per_s": point.bytes_per_s,
    }


def _show_table(title: str, points: Sequence[SweepPoint], best: SweepPoint) -> None:
    depths = sorted({point.options.queue_depth for point in points})
    print(f"{title}\n{'block':>8} " + " ".join(f"{f'x{depth}':>7}" for depth in depths))
    for block in sorted({point.options.block_size_bytes for point in points}):
        row = [point for point in points if point.options.block_size_bytes == block]
        row.sort(key=lambda point: point.options.queue_depth)
        cells = [f"{point.bytes_per_s / 1e9:.2f}{'*' if point is best else ' '}" for point in row]
        print(f"{_block(block):>8} " + " ".join(f"{cell:>7}" for cell in cells))
    print(f"* aio: block_size {best.options.block_size_bytes}, queue_depth {best.options.queue_depth}")


def _plot(path: Path, title: str, points: Sequence[SweepPoint]) -> None:
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'infinity-tiering[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for depth in sorted({point.options.queue_depth for point in points}):
        line = sorted(
            (point.options.block_size_bytes, point.bytes_per_s / 1e9)
            for point in points
            if point.options.queue_depth == depth
        )
        axes.plot([block for block, _ in line], [rate for _, rate in line], marker="o", label=f"depth {depth}")
    blocks = sorted({point.options.block_size_bytes for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [_block(block) for block in blocks])
    axes.set(title=title, xlabel="block size", ylabel="GB/s", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def _write_config(path: Path, options: IoOptions) -> None:
    """Replace the `aio` settings in a configuration, or make one of them alone."""
    try:
        found = {"aio.block_size": options.block_size_bytes, "aio.queue_depth": options.queue_depth}
        config = with_values(path if path.exists() else {}, found)
        path.write_text(json.dumps(config, indent=2) + "\n")
    except (OSError, ConfigError) as error:
        raise ConfigError(f"--write-config {path}: {error}") from error
