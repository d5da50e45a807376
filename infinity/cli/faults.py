"""`infinity plan --simulate-faults`: the planned training under hostile orders, failures and crashes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.planning import Draft
    from infinity.simulation.planned import Search

_LAST = 12  # events and actions of a violation that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    group = parser.add_argument_group("faults")
    group.add_argument(
        "--simulate-faults",
        type=int,
        metavar="STEPS",
        help="run the scheduler of this training through so many steps whose reads, writes and updates end in any "
        "order or fail, and whose processes die; exits with 1 if one of its promises is broken",
    )
    group.add_argument("--seed", type=int, help="the first one that --simulate-faults draws these from (default 0)")


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError if the options say nothing together."""
    if args.simulate_faults is None and args.seed is not None:
        raise ConfigError("--seed is of --simulate-faults: give that, too")
    if args.simulate_faults is not None and args.simulate_faults < 1:
        raise ConfigError(f"--simulate-faults is {args.simulate_faults}; it must be at least 1")


@dataclass(frozen=True)
class Faults:
    """What simulated steps of a plan came to, for people and for JSON."""

    search: Search
    names: list[str]

    @property
    def broken(self) -> bool:
        return self.search.seed is not None

    def facts(self) -> dict[str, Any]:
        """As plain values."""
        search, outcome = self.search, self.search.outcome
        return {
            "first_seed": search.seeds[0],
            "seeds": search.seeds[1],
            "steps": search.steps,
            "events": outcome.events,
            "crashes": outcome.crashes,
            "failures": outcome.failures,
            "violations": int(self.broken),
            "violation": self._violation(),
            "notes": list(search.planned.notes),
        }

    def _violation(self) -> dict[str, Any] | None:
        violation = self.search.violation
        if violation is None:
            return None
        units = {f"u{index}": self.names[int(index)] for index in re.findall(r"\bu(\d+)\b", str(violation))}
        return {
            "seed": self.search.seed,
            "promise": violation.promise,
            "what": str(violation),
            "units": units,
            "repeat": f"--simulate-faults {self.search.scenario_steps} --seed {self.search.seed}",
        }

    def lines(self) -> list[str]:
        """For people."""
        search, outcome = self.search, self.search.outcome
        first, count = search.seeds
        lines = [
            f"faults          {search.steps:,} steps simulated, seeds {first} to {first + count - 1}: "
            f"{outcome.events:,} events, {outcome.crashes:,} crashes, {outcome.failures:,} failures, "
            f"{'1 promise broken' if self.broken else 'no promise broken'}",
            *(f"  not as it is  {note}" for note in search.planned.notes),
        ]
        violation = self._violation()
        if violation is not None:
            units = ", ".join(f"{short} is {name}" for short, name in violation["units"].items())
            lines += [
                f"  broken        {violation['what']}{f' ({units})' if units else ''}",
                f"  promised      {search.promise}",
                f"  repeat it     with {violation['repeat']}; its last events and actions:",
                *search.last_lines(_LAST),
            ]
        return lines


def simulate_faults(args: argparse.Namespace, draft: Draft, later: list[int]) -> Faults | None:
    """Simulate the plan as far as the options ask for it.

    Args:
        later: units whose optimizer states come to the device after the first step.

    Raises:
        ConfigError: the simulation does not know some unit.
    """
    if args.simulate_faults is None:
        return None
    from infinity.planner import once_filled  # noqa: PLC0415  (torch takes seconds)
    from infinity.simulation.planned import planned_of, search  # noqa: PLC0415  (the same)

    config = draft.asked.config
    planned = planned_of(once_filled(draft.plan, config, later), config, len(later))
    return Faults(search(planned, args.simulate_faults, args.seed or 0), [unit.name for unit in draft.plan.units])
