"""Bandwidth, latency under load and processor time of the I/O engines beside fio, on the same work.

    python benchmarks/io_vs_fio.py --path DIR [--quiet 0.3] [--peer-python PYTHON_WITH_DEEPSPEED] [--json FILE]

Alike are the file, the bytes and their order (fio replays our order of mixed reads and writes), block size and depth,
O_DIRECT, registered files and buffers, and the memory: huge pages on both sides, which /proc is asked about; where less
than 4 MiB are in flight, where fio gets none, pages of 4 KiB on both, allocated anew for every run (whether such pages
happen to lie side by side decides how many segments the drive sees). Settings: training's own (1 MiB x 32), the one
that fio likes best, 128 KiB at depth 1, and, of random operations, 4 KiB x 32.

The claim: at least 0.98 of fio's bandwidth in every row, no more processor time a gigabyte, and p50 and p99 within 10%
of fio's; at 4 KiB at least 0.95 of the bandwidth, with at most 1.2 of the processor time. Every round runs all systems
in turn, in changing order; bandwidth and processor time are compared within a round and the median counts, percentiles
are those of the blocks of all rounds. The floor is the drive, so only ratios are claimed. DeepSpeed's async_io, if
asked for, runs with buffers of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from infinity.cli.disk.results import all_latencies, latency_ratios, run_facts
from infinity.config import parse_size
from infinity.io import IoOptions
from infinity.io.bench import BenchRun, BenchSession, bench_file, ring_bytes
from infinity.io.fio import FioJob, fio_huge_page_bytes, fio_version, run_fio
from infinity.io.pages import huge_page_bytes
from infinity.io.patterns import is_random
from infinity.memory.filled import random_memory

OPERATIONS = ("read", "write", "mixed", "randread", "randwrite")
TRAINING = IoOptions()
SETTINGS = tuple(
    IoOptions(*shape) for shape in ((256 << 10, 32), (1 << 20, 8), (1 << 20, 32), (4 << 20, 8), (4 << 20, 32))
)
SHALLOW = IoOptions(128 << 10, 1, 1)
SMALL = IoOptions(4096, 32)
IN_SMALL_PAGES = (SHALLOW, SMALL)
Runner = Callable[[str, IoOptions], BenchRun]


class DeepSpeedWorker:
    """DeepSpeed's async_io in an environment of its own."""

    def __init__(self, python: str, path: Path, size_bytes: int) -> None:
        script = Path(__file__).parent / "peers" / "deepspeed_io.py"
        self._path = path
        self._child = subprocess.Popen(
            [python, str(script), str(size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._jobs, self._answers = self._child.stdin, self._child.stdout
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit("the DeepSpeed worker died; run benchmarks/peers/deepspeed_io.py by hand to see why")
        return json.loads(line)

    def run(self, operation: str, options: IoOptions) -> BenchRun:
        job = {
            "path": str(self._path),
            "operation": operation,
            "block": options.block_size_bytes,
            "depth": options.queue_depth,
            "threads": 1 if options.queue_depth == 1 else 2,
        }
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        return BenchRun(**self._answer())

    def close(self) -> None:
        self._jobs.close()
        self._child.wait()
        self._answers.close()


class Bench:
    """The systems, on one file and in the same kind of memory, which is allocated for every run."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes

    @contextmanager
    def session(self, backend: str, options: IoOptions) -> Iterator[BenchSession]:
        with (
            random_memory(ring_bytes(options), huge_pages=options not in IN_SMALL_PAGES) as buffers,
            BenchSession(self._path, self._size_bytes, backend, options, buffers) as session,
        ):
            yield session

    def ours(self, backend: str) -> Runner:
        def run(operation: str, options: IoOptions) -> BenchRun:
            with self.session(backend, options) as session:
                return session.run(operation)

        return run

    def fio(self, operation: str, options: IoOptions) -> BenchRun:
        return run_fio(self.fio_job(operation, options))

    def fio_job(self, operation: str, options: IoOptions) -> FioJob:
        with self.session("io_uring", options) as session:
            order = session.moves("mixed") if operation == "mixed" else ()
            registered = session.registered
        job = FioJob(self._path, self._size_bytes, operation, options, "io_uring")
        return replace(job, order=order, registered=registered, huge_pages=options not in IN_SMALL_PAGES)

    def huge_page_bytes(self, options: IoOptions) -> dict[str, int | None]:
        """Of both sides' memory."""
        with self.session("io_uring", options) as session:
            ours = huge_page_bytes(session.buffers)
        return {"ours": ours, "fio": fio_huge_page_bytes(self.fio_job("read", options))}


def best_setting(runner: Runner, operation: str) -> IoOptions:
    """Of the settings within 3% of the best median of three passes, the one that costs the least processor time."""
    runs = {options: [runner(operation, options) for _ in range(3)] for options in SETTINGS}
    rates = {options: statistics.median(run.bytes_per_s for run in passes) for options, passes in runs.items()}
    good = [options for options in SETTINGS if rates[options] >= 0.97 * max(rates.values())]
    return min(good, key=lambda options: statistics.median(run.cpu_s_per_gb for run in runs[options]))


def compare(
    runners: dict[str, Runner], operation: str, setting: str, options: IoOptions, rounds: int, quiet: float
) -> dict[str, Any]:
    runs: dict[str, list[BenchRun]] = {name: [] for name in runners}
    busy = []
    for _ in range(rounds):
        busy.append(wait_until_quiet(quiet))
        for name in random.sample(sorted(runners), len(runners)):
            runs[name].append(runners[name](operation, options))
    ours = runs["io_uring"]
    return {
        "operation": operation,
        "setting": setting,
        "block_size_bytes": options.block_size_bytes,
        "queue_depth": options.queue_depth,
        "busy_cores_before_rounds": busy,
        "systems": {
            name: {
                **run_facts(theirs),
                "gb_per_s": [round(run.bytes_per_s / 1e9, 3) for run in theirs],
                "io_uring_ratio": {
                    "bytes_per_s": median_ratio(ours, theirs, lambda run: run.bytes_per_s),
                    "cpu_s_per_gb": median_ratio(ours, theirs, lambda run: max(run.cpu_s_per_gb, 1e-6)),
                    **latency_ratios(all_latencies(ours), all_latencies(theirs)),
                },
            }
            for name, theirs in runs.items()
        },
    }


def median_ratio(ours: list[BenchRun], theirs: list[BenchRun], value: Callable[[BenchRun], float]) -> float:
    return statistics.median(value(us) / value(them) for us, them in zip(ours, theirs, strict=True))


def wait_until_quiet(most: float, patience_s: float = 3.0) -> float:
    """Until others keep fewer cores busy, or patience ends; returns how many they do."""
    deadline_s = time.monotonic() + patience_s
    while True:
        busy = psutil.cpu_percent(interval=0.3) / 100 * (os.cpu_count() or 1)
        if busy <= most or time.monotonic() > deadline_s:
            return round(busy, 2)


def print_row(result: dict[str, Any]) -> None:
    for name, row in result["systems"].items():
        rate, ratio = row["bytes_per_s"], row["io_uring_ratio"]
        others = "  ".join(f"{key} {value:.2f}" for key, value in ratio.items() if key != "bytes_per_s")
        print(
            f"{result['operation']:<9} {result['setting']:<9} {result['block_size_bytes'] >> 10:>5} KiB "
            f"x{result['queue_depth']:<3} {name:<10} {rate['median'] / 1e9:>6.2f} "
            f"({rate['min'] / 1e9:.2f} to {rate['max'] / 1e9:.2f}) GB/s  {row['cpu_s_per_gb']:>6.3f} CPU s/GB  "
            f"io_uring/{name} {ratio['bytes_per_s']:.3f}  {others}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="default: read, write, mixed")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quiet", type=float, default=0.3, help="cores that others may keep busy when a round begins")
    parser.add_argument("--without-threads", action="store_true", help="leave the thread engine out")
    parser.add_argument("--peer-python", help="interpreter of an environment that has DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    with ExitStack() as stack:
        path = stack.enter_context(bench_file(args.path, args.size))
        bench = Bench(path, args.size)
        with bench.session("auto", TRAINING) as session:
            session.fill()
        runners: dict[str, Runner] = {"io_uring": bench.ours("io_uring"), "fio": bench.fio}
        if not args.without_threads:
            runners["threads"] = bench.ours("threads")
        if args.peer_python:
            worker = DeepSpeedWorker(args.peer_python, path, args.size)
            stack.callback(worker.close)
            runners["deepspeed"] = worker.run
        facts = {
            "fio": fio_version(),
            "size_bytes": args.size,
            "rounds": args.rounds,
            "huge_page_bytes": {
                name: bench.huge_page_bytes(options) for name, options in (("training", TRAINING), ("depth 1", SHALLOW))
            },
        }
        results: list[dict[str, Any]] = []
        for operation in args.op or OPERATIONS[:3]:
            settings = {"training": TRAINING, "fio's best": best_setting(bench.fio, operation), "depth 1": SHALLOW}
            if is_random(operation):
                settings["small"] = SMALL
            for setting, options in settings.items():
                results.append(compare(runners, operation, setting, options, args.rounds, args.quiet))
                print_row(results[-1])
                if args.json:
                    args.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
