"""The scheduler in simulated steps, under hostile orders, failures and crashes: how many seeds break a promise, and how
many planted faults are found. Its floor: no seed may break one, and every planted fault is found.

    python benchmarks/simulation.py --seconds 3600 --json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from infinity.simulation.model import Scenario
from infinity.simulation.run import Outcome, search
from tests.simulation.drawn import draw
from tests.simulation.mutants import MUTANTS, find

_STEPS = (4, 12, 60, 400)  # of a scenario
_MUTANT_S = 60.0


def main() -> int:
    """Returns 1 if a promise was broken or a planted fault was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of searching, beside the planted faults")
    parser.add_argument("--seed", type=int, help="the first one; by default one that no run before has taken")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON at the end")
    arguments = parser.parse_args()
    first = time.time_ns() // 1_000_000 if arguments.seed is None else arguments.seed
    total, violations, end = Outcome(), 0, first
    begun_s = time.monotonic()

    def scenario_of(seed: int, _: Outcome) -> Scenario | None:
        return draw(seed, steps=_steps_of(seed)) if time.monotonic() - begun_s < arguments.seconds else None

    while time.monotonic() - begun_s < arguments.seconds:
        outcome, end = search(scenario_of, end)
        if outcome.violation is not None:
            violations += 1
            print(f"python -m tests.simulation {end - 1} --steps {_steps_of(end - 1)}: {outcome.violation}", flush=True)
        total.add(outcome)
    seconds, seeds = time.monotonic() - begun_s, end - first
    rate = f"{total.steps / seconds:.0f} steps/s, {total.events / seconds:.0f} events/s"
    print(f"{seeds} seeds from {first}: {total.steps} steps of one rank, {total.events} events, {rate}")
    found = 0
    for name in MUTANTS:
        how = find(name, _MUTANT_S)
        found += how is not None
        print(f"{name:28} {'not found' if how is None else f'{how.promise:9} {how.seconds:.2f} s'}", flush=True)
    if arguments.json:
        counts = {"steps": total.steps, "events": total.events, "crashes": total.crashes, "failures": total.failures}
        mutants = {"found": found, "of": len(MUTANTS)}
        print(json.dumps({**counts, "violations": violations, "seeds": seeds, "seconds": seconds, "mutants": mutants}))
    return int(violations > 0 or found < len(MUTANTS))


def _steps_of(seed: int) -> int:
    return random.Random(seed).choice(_STEPS)


if __name__ == "__main__":
    sys.exit(main())
