"""Random sequences of API calls, done through the engine and through plain torch side by side.

    python benchmarks/entry_points.py --sequences 2000 --json

The claim: each operation gives torch's numbers or is refused; none crashes or leaks. An operation is a call such as
`state_dict` or `zero_grad`, a checkpoint, an exception or Ctrl-C in a pass, or a write to a parameter;
tests/api/sequences.py lists them. The benchmark counts and does not time, so it states no floor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.api.sequences import CASES, OPERATIONS, run_sequence


def held(path: Path) -> dict[str, int]:
    """What a leak would show in: descriptors, threads, files and memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "files": sum(file.is_file() for file in path.rglob("*")),
        "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def run(sequences: int, seed: int, path: Path) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    failures = []
    settled: dict[str, int] = {}
    for index in range(sequences):
        choice = random.Random(seed + index)
        case = choice.choice(CASES)
        names = choice.choices(sorted(OPERATIONS), k=choice.randrange(3, 14))
        with tempfile.TemporaryDirectory(dir=path) as place:
            try:
                outcomes += run_sequence(case, names, seed + index, Path(place))
            except Exception as error:
                failures.append(
                    {"seed": seed + index, "operations": names, "error": f"{type(error).__name__}: {error}"[:500]}
                )
        if index == sequences // 4:  # caches are full by then
            settled = held(path)
    refusals = {key.removeprefix("refused "): n for key, n in outcomes.most_common() if key.startswith("refused ")}
    return {
        "sequences": sequences,
        "seed": seed,
        "done": outcomes["done"],
        "refused": outcomes["refused"],
        "stopped": outcomes["stopped"],
        "failures": failures,
        "held_after_a_quarter": settled,
        "held_at_the_end": held(path),
        "refusals": refusals,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, default=Path(), help="directory on the drive")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as path:
        result = run(args.sequences, args.seed, Path(path))
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:<22} {value}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
