"""`python -m tests.simulation SEED` runs a seed and prints its events and actions; see docs/simulation.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path

from infinity.simulation.invariants import PROMISES
from infinity.simulation.model import Scenario
from infinity.simulation.run import Outcome, search, simulate
from tests.simulation.drawn import draw
from tests.simulation.mutants import MUTANTS, find, planted
from tests.simulation.shrink import parse, shrink, text

_SHOWN = 5  # decisions behind the first that differs


def main() -> int:
    """Returns 1 if a promise is broken, a mutant is not found, or the engine decides otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seed", nargs="?", type=int, default=0, help="of the scenario, or the first of those searched")
    parser.add_argument("--seconds", type=float, help="run one seed after the other for so long, up to a violation")
    parser.add_argument("--steps", type=int, default=12, help="of each scenario")
    parser.add_argument("--deaths", type=float, default=0.0, help="share of calls in which a process dies")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the scenario that an earlier run has printed")
    parser.add_argument("--engine", action="store_true", help="run it on the engine, too, and compare the decisions")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant a fault")
    parser.add_argument("--mutants", action="store_true", help="look for the seed that finds each planted fault")
    arguments = parser.parse_args()
    if arguments.mutants:
        return _find_all(arguments.seconds or 60.0)
    drawn = partial(draw, steps=arguments.steps, deaths=arguments.deaths)
    with planted(arguments.mutant) if arguments.mutant else nullcontext():
        if arguments.seconds is not None:
            return _search(drawn, arguments.seed, arguments.seconds)
        replay: Path | None = arguments.replay
        scenario = drawn(arguments.seed) if replay is None else parse(replay.read_text())
        if arguments.engine:
            return _compare(scenario)
        outcome = simulate(scenario, print)
        return _tell(scenario, outcome)


def _search(drawn: Callable[[int], Scenario], seed: int, seconds: float) -> int:
    end_s = time.monotonic() + seconds
    total, end = search(lambda seed, _: drawn(seed) if time.monotonic() < end_s else None, seed)
    if total.violation is not None:
        print(f"seed {end - 1}")
        return _tell(drawn(end - 1), total)
    print(f"{total.steps} steps, {total.events} events, {total.crashes} crashes, {total.failures} failures: all holds")
    return 0


def _tell(scenario: Scenario, outcome: Outcome) -> int:
    if outcome.violation is None:
        print(f"{outcome.steps} steps, {outcome.events} events: all holds")
        return 0
    print(f"\n{outcome.violation}\n({PROMISES[outcome.violation.promise]})\n\nThe shortest that was found:\n")
    short = shrink(scenario)
    print(simulate(short, print).violation)
    print(f"\nTo replay it with --replay:\n\n{text(short)}")
    return 1


def _compare(scenario: Scenario) -> int:
    """Replay what can be expressed of a scenario on the engine."""
    from tests.simulation.replay import expressed, on_engine, simulated  # noqa: PLC0415  (torch takes seconds)

    scenario, left_out = expressed(scenario)
    print("".join(f"left out: {each}\n" for each in left_out) + text(scenario))
    here, there = simulated(scenario), on_engine(scenario)
    pairs = zip(here.decisions, there.decisions, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for name, log in (("simulation", here), ("engine", there)):
        print(f"\n{name}: {len(log.decisions)} decisions, the first {same} alike; {log.error or 'no error'}")
        for event, actions in log.decisions[same : same + _SHOWN]:
            print(f"  {event} -> {', '.join(map(str, actions))}")
    return int(here.decisions != there.decisions or bool(here.error) is not bool(there.error))


def _find_all(most_s: float) -> int:
    missed = 0
    for name in MUTANTS:
        found = find(name, most_s)
        missed += found is None
        told = "not found" if found is None else f"{found.promise:9} seed {found.seed}, {found.seconds:.2f} s"
        print(f"{name:32} {told}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
