"""Random extents in random sizes, order and priority, written and read back, with every byte verified.

    python benchmarks/io_soak.py --path DIR --total 200GB [--backend io_uring]

The claim: no byte is ever wrong. A copy of the file in memory says what each extent must hold. In every round the file
is cut into disjoint extents; some are changed and written, the others are read and compared, all in flight at once.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from infinity.config import parse_size
from infinity.io import IoEngine, IoFile, IoFuture, IoOptions, Priority, open_engine
from infinity.io.bench import bench_file
from infinity.memory import Arena, Lease

PAGE_BYTES = 4096
MEAN_EXTENTS = 200  # in a round


def soak_round(engine: IoEngine, file: IoFile, copy: Lease, target: Lease, rng: random.Random) -> int:
    """One round; returns the bytes moved.

    Raises:
        AssertionError: an extent holds other bytes than were written to it.
    """
    pages = copy.nbytes // PAGE_BYTES
    cuts = sorted({0, pages, *(rng.randrange(pages) for _ in range(rng.randrange(1, 2 * MEAN_EXTENTS)))})
    extents = [(a * PAGE_BYTES, (b - a) * PAGE_BYTES) for a, b in pairwise(cuts)]
    rng.shuffle(extents)
    flights: list[tuple[IoFuture, tuple[int, int] | None]] = []
    for offset, nbytes in extents:
        priority = rng.choice(list(Priority))
        if rng.random() < 0.5:
            copy.tensor(torch.uint8, nbytes, offset).add_(rng.randrange(1, 256))
            flights.append((engine.write(file, offset, copy.span(offset, nbytes), priority), None))
        else:
            future = engine.read(file, offset, target.span(offset, nbytes), priority)
            flights.append((future, (offset, nbytes)))
    moved = 0
    for future, extent in flights:
        moved += future.result()
        if extent is not None:
            offset, nbytes = extent
            wanted, found = (lease.tensor(torch.uint8, nbytes, offset) for lease in (copy, target))
            if not torch.equal(wanted, found):
                raise AssertionError(f"{nbytes} bytes at offset {offset} are not what was written")
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="directory on the drive")
    parser.add_argument("--total", type=parse_size, default=parse_size("200GB"), help="bytes to move")
    parser.add_argument("--size", type=parse_size, default=512 << 20, help="bytes of the file, and twice of memory")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    arena = Arena(2 * args.size)
    copy, target = arena.lease(args.size), arena.lease(args.size)
    copy.tensor(torch.uint8).random_()
    moved = rounds = 0
    start_s = time.monotonic()
    with bench_file(args.path, args.size) as path:
        while moved < args.total:  # engines come and go too, with other blocks and depths each
            options = IoOptions(PAGE_BYTES << rng.randrange(11), rng.choice((1, 3, 8, 32, 64)), rng.randrange(1, 9))
            engine = open_engine(options, args.backend)
            file = engine.open(path)
            if rng.random() < 0.5:
                engine.register(copy.span())
            if moved == 0:
                moved += engine.write(file, 0, copy.span()).result()
            for _ in range(8):
                moved += soak_round(engine, file, copy, target, rng)
                rounds += 1
                if moved >= args.total:
                    break
            file.close()
            engine.close()
            if sys.stderr.isatty():
                print(f"\r\x1b[K{moved / 1e9:.1f} of {args.total / 1e9:.0f} GB", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start_s
    print(
        json.dumps({"backend": engine.backend, "bytes": moved, "rounds": rounds, "seconds": seconds, "seed": args.seed})
    )


if __name__ == "__main__":
    main()
