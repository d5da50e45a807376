"""Runs a scenario on all of its ranks, call by call, and restarts them after a failure or a crash."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import CapacityError, StorageError
from infinity.simulation.clock import Crash
from infinity.simulation.invariants import Violation, check_committed, violate
from infinity.simulation.model import Call, Death, Fault, Interrupt, Pass, Scenario, Step
from infinity.simulation.rank import Rank
from infinity.zero import filling as filling_module


@dataclass
class Outcome:
    """The result of a scenario.

    Attributes:
        steps: number of steps, summed over ranks.
        events: number of events that schedulers received.
        crashes, failures: number of crashes, and of errors, that ended the training of all ranks.
        adopted: number of crashes after which each rank's drives were found to have its last committed step.
        violation: the broken promise; None if there is none.
    """

    steps: int = 0
    events: int = 0
    crashes: int = 0
    adopted: int = 0
    failures: int = 0
    violation: Violation | None = None

    def add(self, other: Outcome) -> None:
        """Add the counts of another outcome."""
        for name in ("steps", "events", "crashes", "adopted", "failures"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.violation = self.violation or other.violation


class _Agreement:
    """Checks that all ranks report the same sequence of facts as the first rank."""

    def __init__(self, ranks: int) -> None:
        self._said: list[object] = []
        self._heard = [0] * ranks

    def of(self, rank: int) -> Callable[[object], None]:
        def agree(what: object) -> None:
            at, self._heard[rank] = self._heard[rank], self._heard[rank] + 1
            if not rank:
                self._said.append(what)
            elif at >= len(self._said) or self._said[at] != what:
                first = self._said[at] if at < len(self._said) else "nothing"
                violate("agreed", f"rank {rank} is at {what}, and rank 0 was at {first}")

        return agree

    def check(self) -> None:
        """Check after a call that all ranks have reported equally many facts."""
        if any(heard != len(self._said) for heard in self._heard):
            violate("agreed", f"ranks have reported {self._heard} agreed events")
        self._said.clear()
        self._heard = [0] * len(self._heard)


class World:
    """All ranks of a scenario."""

    def __init__(self, scenario: Scenario, trace: Callable[[str], None] | None = None) -> None:
        self.outcome = Outcome()
        self.ranks: list[Rank] = []
        self._scenario = scenario
        self._trace = trace
        self._starts = 0

    def run(self) -> Outcome:
        """Make all calls. Stops at the first violation."""
        try:
            self._start([[0] * len(self._scenario.config.units)] * len(self._scenario.config.ranks))
            for call, last in with_last(self._scenario.calls):
                self._call(call, last=last)
            self._close()
        except Violation as violation:
            self.outcome.violation = violation
        except Exception as error:  # raised by the simulated code
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({Path(at.filename).name}, {at.name})"
            self.outcome.violation = Violation("raises", what)
        self.outcome.events += sum(rank.events for rank in self.ranks)
        return self.outcome

    def _start(self, versions: list[list[int]]) -> None:
        config, seed = self._scenario.config, self._scenario.seed
        self._agreement = _Agreement(len(config.ranks))
        self.outcome.events += sum(rank.events for rank in self.ranks)
        self.ranks = []
        for index in range(len(config.ranks)):
            if self._trace is not None:
                self._trace(f"rank {index} starts at versions {versions[index]}")
            seed_of = (seed * 1009 + self._starts) * 8 + index
            self.ranks.append(Rank(config, index, seed_of, versions[index], self._agreement.of(index), self._trace))
        self._starts += 1

    def _call(self, call: Call, *, last: bool) -> None:
        if isinstance(call, Fault):
            self.ranks[call.rank].clock.faults.append(call.kind)
            return
        if isinstance(call, Death):
            clock = self.ranks[call.rank].clock
            clock.crash_at = clock.now + call.ticks
            return
        if isinstance(call, Interrupt):
            clock = self.ranks[call.rank].clock
            clock.interrupt_at = clock.now + call.ticks
            return
        try:
            for index, rank in enumerate(self.ranks):
                if self._trace is not None:
                    self._trace(f"rank {index}: {call}{' (the last of its step)' if last else ''}")
                rank.call(call, last=last)
                if rank.failed:
                    self._fail(None)
                    return
            self._agreement.check()
            suits = all(rank.reduction is None or rank.reduction.suits for rank in self.ranks)
            order = None if suits or self.ranks[0].reduction is None else self.ranks[0].reduction.left
            for rank in self.ranks:
                rank.learn(order)
        except Crash:
            self.outcome.crashes += 1
            survived = [self._survives(rank) for rank in self.ranks]
            self.outcome.adopted += all(rank.committed is not None for rank in self.ranks)
            # Ranks do not die inside of a collective here, so their steps may differ: several ranks start again.
            self._start(survived if len(survived) == 1 else [[0] * len(versions) for versions in survived])
            return
        except (StorageError, CapacityError) as error:
            self._fail(error)
            return
        self.outcome.steps += len(self.ranks) if isinstance(call, Step) else 0

    def _close(self) -> None:
        try:
            for rank in self.ranks:
                rank.clock.interrupt_at = None
                rank.close()
        except (Crash, StorageError):
            self._fail(None)

    def _fail(self, error: Exception | None) -> None:
        """End the training of all ranks after an error, and restart it from a checkpoint."""
        if isinstance(error, CapacityError):
            violate("refusal", str(error))
        self.outcome.failures += 1
        for rank in self.ranks:
            rank.failed = True
            rank.clock.crash_at, rank.clock.interrupt_at = -1, None
            rank.close()
        self._start([[0] * len(rank.rows) for rank in self.ranks])

    @staticmethod
    def _survives(rank: Rank) -> list[int]:
        """Return the versions on the drives after a crash; those of a checkpoint if no step was committed."""
        if rank.committed is None:
            return [0] * len(rank.rows)
        check_committed(rank)
        return [row.protected[0] for row in rank.rows]


def with_last(calls: tuple[Call, ...]) -> list[tuple[Call, bool]]:
    """Return each call, and whether it is the last training pass of its step."""
    pairs: list[tuple[Call, bool]] = []
    last = False
    for call in reversed(calls):
        trains = isinstance(call, Pass) and not call.evaluates
        pairs.append((call, last and trains))
        last = isinstance(call, Step) or (last and not trains)
    return pairs[::-1]


def simulate(scenario: Scenario, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run a scenario to its end, or to the first promise that is broken."""
    before, filling_module._log.disabled = filling_module._log.disabled, True  # its warnings are for users
    try:
        return World(scenario, trace).run()
    finally:
        filling_module._log.disabled = before


def search(scenario_of: Callable[[int, Outcome], Scenario | None], seed: int) -> tuple[Outcome, int]:
    """Simulate seed after seed, until a violation or the last scenario.

    Args:
        scenario_of: returns the scenario of a seed, or None to end; its second argument is the outcome so far.

    Returns:
        The sum of the outcomes, and the first seed that was not simulated.
    """
    total = Outcome()
    while total.violation is None and (scenario := scenario_of(seed, total)) is not None:
        total.add(simulate(scenario))
        seed += 1
    return total, seed
