"""Latency of a demand read alone, and behind gigabytes of queued write-back.

    python benchmarks/io_latency.py --path DIR [--json FILE]

The claim: behind 4 GiB of write-back the median demand read takes at most 3 times as long as alone. The floor is what
the drive needs for the blocks that it already holds when the read arrives.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from infinity.config import parse_size
from infinity.io import IoEngine, IoFile, IoOptions, Priority, Span, open_engine
from infinity.io.bench import bench_file
from infinity.memory import Arena, Lease

BURST_BYTES = 64 << 20  # of one write request


def read_latency_s(engine: IoEngine, file: IoFile, offset: int, span: Span) -> float:
    start_s = time.perf_counter()
    engine.read(file, offset, span, Priority.DEMAND).result()
    return time.perf_counter() - start_s


def measure(
    path: Path, size_bytes: int, backend: str, options: IoOptions, leases: tuple[Lease, Lease]
) -> dict[str, Any]:
    source, target = leases
    engine = open_engine(options, backend)
    file = engine.open(path)
    for lease in leases:
        engine.register(lease.span())
    alone_s = [read_latency_s(engine, file, i * target.nbytes, target.span()) for i in range(200)]
    offsets = range(0, size_bytes - BURST_BYTES + 1, BURST_BYTES)
    writes = [engine.write(file, offset, source.span(), Priority.WRITE_BACK) for offset in offsets]
    start_s = time.perf_counter()
    behind_s: list[float] = []
    while not writes[-1].done():
        time.sleep(0.005)  # reads arrive now and then, not back to back
        behind_s.append(read_latency_s(engine, file, len(behind_s) % 200 * target.nbytes, target.span()))
    for write in writes:
        write.result()
    write_s = time.perf_counter() - start_s
    file.close()
    engine.close()
    return {
        "backend": engine.backend,
        "block_size_bytes": options.block_size_bytes,
        "queue_depth": options.queue_depth,
        "alone_ms": statistics.median(alone_s) * 1e3,
        "behind_ms": statistics.median(behind_s) * 1e3,
        "behind_p90_ms": sorted(behind_s)[len(behind_s) * 9 // 10] * 1e3,
        "ratio": statistics.median(behind_s) / statistics.median(alone_s),
        "write_gb_per_s": len(writes) * BURST_BYTES / write_s / 1e9,
        "reads": len(behind_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--size", type=parse_size, default=4 << 30, help="bytes of write-back (default 4GiB)")
    parser.add_argument("--read-size", type=parse_size, default=1 << 20, help="bytes of a demand read (default 1MiB)")
    parser.add_argument("--block-size", type=parse_size, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    arena = Arena(BURST_BYTES + args.read_size)
    leases = (arena.lease(BURST_BYTES), arena.lease(args.read_size))
    leases[0].tensor(torch.uint8).random_()
    options = IoOptions(args.block_size, args.queue_depth)
    results: list[dict[str, Any]] = []
    with bench_file(args.path, args.size) as path:
        measure(path, args.size, "auto", options, leases)  # writes every block once
        for _ in range(args.rounds):
            for backend in ("io_uring", "threads"):
                results.append(measure(path, args.size, backend, options, leases))
                print(json.dumps(results[-1]), flush=True)
    for backend in ("io_uring", "threads"):
        ratios = sorted(result["ratio"] for result in results if result["backend"] == backend)
        print(f"{backend}: {statistics.median(ratios):.2f} times as long ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
