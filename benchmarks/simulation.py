"""The scheduler in simulated steps, under hostile orders, failures and crashes: how many seeds break a promise, and how
many planted faults are found. Its floor: no seed may break one, and every planted fault is found.

A seed whose steps are committed dies during half of its calls. `crashes` counts deaths after which the last committed
step was looked for on the drives of each rank, and `deaths` all of them.

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
_DEATHS = 0.5  # share of calls in which a process dies, where steps are committed
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
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()

    def scenario_of(seed: int, _: Outcome) -> Scenario | None:
        return _scenario(seed) if time.monotonic() - begun_s < arguments.seconds else None

    while time.monotonic() - begun_s < arguments.seconds:
        outcome, end = search(scenario_of, end)
        if outcome.violation is not None:
            violations += 1
            print(f"{_command(end - 1)}: {outcome.violation}", flush=True)
        total.add(outcome)
    seconds, seeds = time.monotonic() - begun_s, end - first
    cpu_s = time.process_time() - begun_cpu_s
    rate = f"{total.steps / cpu_s:.0f} steps/s, {total.events / cpu_s:.0f} events/s"
    counts = (
        f"{total.steps} steps of one rank, {total.events} events, {total.adopted} crashes, {total.failures} failures"
    )
    print(f"{seeds} seeds from {first}: {counts} in {cpu_s:.0f} s of a core, {rate}", flush=True)
    found = 0
    for name in MUTANTS:
        how = find(name, _MUTANT_S)
        found += how is not None
        print(f"{name:28} {'not found' if how is None else f'{how.promise:9} {how.seconds:.2f} s'}", flush=True)
    if arguments.json:
        figures = {
            "steps": total.steps,
            "events": total.events,
            "crashes": total.adopted,
            "deaths": total.crashes,
            "failures": total.failures,
            "violations": violations,
            "seeds": seeds,
            "seconds": seconds,
            "cpu_seconds": cpu_s,
            "mutants": {"found": found, "of": len(MUTANTS)},
        }
        print(json.dumps(figures))
    return int(violations > 0 or found < len(MUTANTS))


def _scenario(seed: int) -> Scenario:
    return draw(seed, steps=_steps_of(seed), deaths=_DEATHS)


def _command(seed: int) -> str:
    return f"python -m tests.simulation {seed} --steps {_steps_of(seed)} --deaths {_DEATHS}"


def _steps_of(seed: int) -> int:
    return random.Random(seed).choice(_STEPS)


if __name__ == "__main__":
    sys.exit(main())
