"""What has come of one check."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from infinity.errors import ConfigError


class Verdict(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"  # by name: it cannot be had on this device


@dataclass(frozen=True)
class Outcome:
    """One check, and what is to be said of it.

    Attributes:
        area: what it belongs to.
        words: what differs, or why it was refused; nothing where it is right.
    """

    area: str
    name: str
    verdict: Verdict
    words: str
    seconds: float


@dataclass(frozen=True)
class Check:
    """Something to try.

    Attributes:
        run: returns what is wrong, in words; nothing where all is right.
    """

    area: str
    name: str
    run: Callable[[], str]

    def outcome(self) -> Outcome:
        """Try it; whatever it raises is an outcome, too."""
        start_s = time.perf_counter()
        try:
            words = self.run()
            verdict = Verdict.WRONG if words else Verdict.RIGHT
        except ConfigError as error:
            verdict, words = Verdict.REFUSED, str(error)
        except Exception as error:  # what it is does not matter: this does not work here
            verdict, words = Verdict.WRONG, f"{type(error).__name__}: {error}"
        return Outcome(self.area, self.name, verdict, words, time.perf_counter() - start_s)


def outcomes(checks: list[Check], progress: Callable[[str, float], None]) -> Iterator[Outcome]:
    """Try them one after the other.

    Args:
        progress: is told what is tried, and how much of all is done.
    """
    for number, check in enumerate(checks):
        progress(f"{check.area}: {check.name}", number / len(checks))
        yield check.outcome()
