"""`infinity plan --simulate-faults`: simulate the planned training with random orders, failures and crashes."""

from __future__ import annotations

import argparse
import re
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import check_least
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.planning import Draft
    from infinity.planner.planned import Planned
    from infinity.simulation.run import Outcome

_LAST = 12  # the last events and actions before a violation, which are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--simulate-faults",
        type=int,
        metavar="STEPS",
        help="simulate this number of steps of the scheduler, in which reads, writes and updates end in any order or "
        "fail, and processes die; exits with 1 if the scheduler breaks a promise",
    )
    group.add_argument("--seed", type=int, help="first seed of --simulate-faults (default 0)")


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError if the options cannot be combined."""
    if args.simulate_faults is None and args.seed is not None:
        raise ConfigError("--seed needs --simulate-faults: give both")
    check_least(args, 1, "simulate_faults")


@dataclass(frozen=True)
class Faults:
    """The result of a simulation, as text and as JSON.

    Attributes:
        seeds: the first seed, and the one after the last.
        names: names of the units.
    """

    planned: Planned
    outcome: Outcome
    seeds: tuple[int, int]
    names: list[str]

    @property
    def broken(self) -> bool:
        return self.outcome.violation is not None

    @property
    def _steps(self) -> int:
        """Steps of the training, which all ranks take together."""
        return self.outcome.steps // len(self.planned.config.ranks)

    def facts(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "first_seed": self.seeds[0],
            "seeds": self.seeds[1] - self.seeds[0],
            "steps": self._steps,
            "events": self.outcome.events,
            "crashes": self.outcome.crashes,
            "failures": self.outcome.failures,
            "violations": int(self.broken),
            "violation": self._violation(),
            "notes": list(self.planned.notes),
        }

    def _violation(self) -> dict[str, Any] | None:
        from infinity.planner.planned import SCENARIO_STEPS

        violation, seed = self.outcome.violation, self.seeds[1] - 1
        if violation is None:
            return None
        return {
            "seed": seed,
            "promise": violation.promise,
            "what": str(violation),
            "units": {f"u{index}": self.names[int(index)] for index in re.findall(r"\bu(\d+)\b", str(violation))},
            "repeat": f"--simulate-faults {SCENARIO_STEPS} --seed {seed}",
        }

    def lines(self) -> list[str]:
        """Return the result as text."""
        outcome, (first, end) = self.outcome, self.seeds
        lines = [
            f"faults          {self._steps:,} steps simulated, seeds {first} to {end - 1}: {outcome.events:,} events, "
            f"{outcome.crashes:,} crashes, {outcome.failures:,} failures, "
            f"{'1 promise broken' if self.broken else 'no promise broken'}",
            *(f"  simplified    {note}" for note in self.planned.notes),
        ]
        found = self._violation()
        if found is not None:
            units = ", ".join(f"{short} is {name}" for short, name in found["units"].items())
            lines += [
                f"  broken        {found['what']}{f' ({units})' if units else ''}",
                f"  promised      {self._promise()}",
                f"  repeat it     with {found['repeat']}; its last events and actions:",
                *self._last_lines(found["seed"]),
            ]
        return lines

    def _promise(self) -> str:
        from infinity.simulation.invariants import PROMISES

        return "" if self.outcome.violation is None else PROMISES[self.outcome.violation.promise]

    def _last_lines(self, seed: int) -> list[str]:
        from infinity.simulation.run import simulate

        lines: deque[str] = deque(maxlen=_LAST)
        simulate(self.planned.scenario(seed), lines.append)
        return list(lines)


def simulate_faults(args: argparse.Namespace, draft: Draft, later: list[int]) -> Faults | None:
    """Simulate the plan, if the options ask for it.

    Args:
        later: units whose optimizer states move to the device after the first step.

    Raises:
        ConfigError: a unit cannot be simulated.
    """
    if args.simulate_faults is None:
        return None
    from infinity.planner.planned import planned_of, search_planned

    config, first = draft.asked.config, args.seed or 0
    planned = planned_of(draft.plan, config, later)
    outcome, end = search_planned(planned, args.simulate_faults, first)
    return Faults(planned, outcome, (first, end), [unit.name for unit in draft.plan.units])
