"""Checks and their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from infinity.errors import ConfigError


class Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"  # with an error that says why this device does not support it


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        area: the group of checks that it belongs to.
        words: what differs, or why it was refused; empty if it is right.
    """

    area: str
    name: str
    verdict: Verdict
    words: str
    seconds: float


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        run: returns what is wrong, in words; an empty text if all is right.
    """

    area: str
    name: str
    run: Callable[[], str]

    def outcome(self) -> Outcome:
        """Run the check. Errors become outcomes, too."""
        start_s = time.perf_counter()
        try:
            words = self.run()
            verdict = Verdict.WRONG if words else Verdict.RIGHT
        except ConfigError as error:
            verdict, words = Verdict.REFUSED, str(error)
        except Exception as error:  # any error means that this does not work on this machine
            verdict, words = Verdict.WRONG, f"{type(error).__name__}: {error}"
        return Outcome(self.area, self.name, verdict, words, time.perf_counter() - start_s)


def outcomes(checks: list[Check], progress: Callable[[str, float], None]) -> Iterator[Outcome]:
    """Run the checks one after the other.

    Args:
        progress: called with the next check, and the share of all checks that are done, 0 to 1.
    """
    for number, check in enumerate(checks):
        progress(f"{check.area}: {check.name}", number / len(checks))
        yield check.outcome()
