"""`infinity bench-adam`: measure the CPU optimizer, and compare it with its peers and the memory bandwidth."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import path_argument, program_argument
from infinity.cli.plots import new_figure, save_figure
from infinity.cli.progress import Progress
from infinity.config import format_size
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.optim.bench import AdamBenchResult

_PEERS = {"torch-fused": "torch fused", "torch-foreach": "torch foreach"}
_PEER = Path(__file__).parent / "launch" / "adam_peer.py"
_QUARTILES = ("low", "median", "high")
_LEAST_BYTES = 16  # per parameter: parameter, gradient and both moments in fp32


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench-adam", help="measure the CPU optimizer, and compare it with torch's and DeepSpeed's"
    )
    parser.add_argument(
        "--size", type=_count, nargs="+", default=[100_000_000], help="numbers of parameters (default 100M)"
    )
    parser.add_argument("--format", nargs="+", default=["fp32", "split"], help="state formats (default fp32 split)")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[os.cpu_count() or 1], help="numbers of threads (default: all cores)"
    )
    parser.add_argument(
        "--peer",
        nargs="*",
        choices=sorted(_PEERS),
        default=["torch-fused"],
        help="optimizers to compare with (default torch-fused)",
    )
    parser.add_argument(
        "--peer-python", type=program_argument, help="interpreter of an environment with DeepSpeed, to compare with"
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of each (default 15)")
    parser.add_argument("--json", action="store_true", help="one JSON line a result on standard output")
    parser.add_argument("--plot", type=path_argument, help="also draw the rates into this image file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return the exit code."""
    from infinity.memory import available_memory_bytes
    from infinity.optim.bench import AdamBenchJob, Peer, run_adam_bench

    for name, least in (("rounds", args.rounds), ("threads", min(args.threads))):
        if least < 1:
            raise ConfigError(f"--{name} is {least}; it must be at least 1")
    free = available_memory_bytes()
    for numel in args.size:
        if (needed := _LEAST_BYTES * numel) > free:
            raise ConfigError(
                f"--size {numel}: states of so many parameters take {format_size(needed)} or more, and "
                f"{format_size(free)} of memory are free: give a smaller --size"
            )
    other = None
    if args.peer_python is not None:
        other = Peer("DeepSpeedCPUAdam", partial(_peer_process, args.peer_python))
    records = []
    for numel in args.size:
        for threads in args.threads:
            peers = tuple(_PEERS[name] for name in args.peer)
            job = AdamBenchJob(numel, threads, tuple(args.format), peers, other, args.rounds)
            with Progress() as progress:
                results = run_adam_bench(job, progress.show)
            block = [_record(result, results, numel, threads) for result in results]
            records.extend(block)
            if args.json:
                print("\n".join(json.dumps(record) for record in block), flush=True)
            else:
                _print_table(block, args.format)
    if args.plot is not None:
        _plot(records, args.plot)
    return 0


def _count(text: str) -> int:
    """Argparse type: parse a number of parameters such as 100M, 1.5B or 4096."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper(), 1)
    try:
        count = int(float(text if factor == 1 else text[:-1]) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write 4096, 100M or 1.5B")
    return count


def _record(result: AdamBenchResult, all_results: list[AdamBenchResult], numel: int, threads: int) -> dict[str, Any]:
    from infinity import kernels
    from infinity.optim.bench import TRIAD

    triad = next(other for other in all_results if other.name == TRIAD)
    rate = result.params_per_s(numel)
    return {
        "name": result.name,
        "params": numel,
        "threads": threads,
        "instruction_set": kernels.active_instruction_set(),
        "machine": platform.machine(),
        "params_per_s": rate,
        "bytes_per_param": result.bytes_per_param,
        "bytes_per_s": rate * result.bytes_per_param,
        "seconds": list(result.seconds),
        "speed_relative_to": {
            other.name: dict(zip(_QUARTILES, result.ratio(other), strict=True))
            for other in all_results
            if other is not result and other.name != TRIAD
        },
        "bandwidth_relative_to_triad": dict(zip(_QUARTILES, result.bandwidth_ratio(triad), strict=True)),
    }


def _print_table(block: list[dict[str, Any]], formats: list[str]) -> None:
    """Print rates, and speeds relative to the peers, with quartiles; relative to the triad, the bandwidth."""
    first = block[0]
    print(f"{first['params']:,} parameters, {first['threads']} threads, {first['instruction_set']}")
    others = [record["name"] for record in block if record["name"] in block[0]["speed_relative_to"]]
    others = [block[0]["name"], *(name for name in others if name not in formats)]
    titles = ["GB/s / triad's", *(f"x {name}" for name in others)]
    print(f"  {'':<16}{'G params/s':>11}{'GB/s':>7}  " + "".join(f"{title:>26}" for title in titles))
    for record in block:
        found = [record["bandwidth_relative_to_triad"], *map(record["speed_relative_to"].get, others)]
        ratios = ""
        for ratio in found:
            text = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
            ratios += f"{text:>26}"
        rate, bandwidth = record["params_per_s"] / 1e9, record["bytes_per_s"] / 1e9
        print(f"  {record['name']:<16}{rate:>11.2f}{bandwidth:>7.0f}  {ratios}")


def _plot(records: list[dict[str, Any]], path: Path) -> None:
    labels = [f"{r['name']}\n{r['params'] / 1e6:g}M, {r['threads']} thr" for r in records]
    figure = new_figure("--plot", 1.5 + 0.9 * len(records), 4)
    axes = figure.subplots()
    axes.bar(range(len(records)), [r["params_per_s"] / 1e9 for r in records])
    axes.set_xticks(range(len(records)), labels, fontsize=7)
    axes.set_ylabel("G parameters/s (median)")
    save_figure(figure, "--plot", path)


@contextmanager
def _peer_process(python: Path, numel: int, threads: int) -> Iterator[Callable[[], float]]:
    """Run DeepSpeed's optimizer in a process of its own. Each call of the yielded function returns a step's seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', '')}"  # for its own ninja
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory(prefix="infinity-peer-") as built, tempfile.TemporaryFile("w+") as log:
        # DeepSpeed compiles into this directory and loads libraries from it, so no other user may write to it.
        environment.setdefault("TORCH_EXTENSIONS_DIR", built)
        try:
            process = subprocess.Popen(
                [str(python), str(_PEER), str(numel)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        except OSError as error:
            raise ConfigError(f"--peer-python {python} does not start: {error}") from error

        def step() -> float:
            requests, answers = process.stdin, process.stdout
            assert requests is not None and answers is not None  # noqa: PT018  (both are pipes)
            with suppress(BrokenPipeError):
                requests.write("step\n")
                requests.flush()
            while line := answers.readline():  # DeepSpeed prints lines of its own
                if line.startswith("seconds "):
                    return float(line.split()[1])
            log.seek(0)
            raise ConfigError(f"the DeepSpeed peer ended; its last output:\n{log.read()[-2000:]}")

        try:
            yield step
        finally:
            process.kill()
            process.communicate()
