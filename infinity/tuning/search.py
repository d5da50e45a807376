"""Which setting is fastest: those that the plan likes are measured in turn with the best so far.

[Note: what a measurement is worth]
Other work on the machine makes the same step take half as long again, for minutes. So a challenger is compared with a
run of the holder from just before, never with one of long ago, and wins if it was faster by more than a little in the
median of two to five such pairs: the more runs of one setting differ among themselves, the more are needed. One pair is
enough where it takes less than half, or longer by more than twice what they differ; its process is ended as soon as
even its fastest step says so. As long as few settings have run more than once, so that nobody knows what they differ
by, it is taken to be much. Where the holder has won its place from another than the given configuration, it is
compared with that one, too, before it is handed out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from infinity.tuning.outlook import Outlook
from infinity.tuning.record import Duel, Record, Run
from infinity.tuning.space import Choices, Setting

GAIN = 0.97  # of the holder's step: less of a difference is none
CLOSE, NOISE = 0.05, 0.3  # the least and the most that runs of one setting are taken to differ by
UNKNOWN = 0.15  # the least where fewer than so many settings have run more than once
_KNOWN_BY = 3
DECISIVE = 0.5  # one pair is enough
CANNOT_WIN = 0.1  # beyond that: even the fastest step is so much slower than the holder's median
HOPELESS = 1.5  # of the holder's step, by the plan, which is wrong by a fifth
_MOST_PAIRS = 5
_SPREAD_OVER = 4  # runs of a setting
_REUSED = 2  # challengers that one run of the holder is compared with

Measure = Callable[[Setting, float, float], Run]
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Outcome:
    """What a search has found.

    Attributes:
        best: the given one if nothing beats it.
        ratio: its step over the given one's, of runs next to one another where there are any; 1.0 for the given one,
            0.0 where that did not run.
        ending: why the search ended, in words.
    """

    given: Setting
    best: Setting
    ratio: float
    ending: str


class Search:
    """Measures settings until nothing is left that could win, or the time is up.

    Args:
        measure: trains a few steps with a setting, in a process of its own; ended once its fastest step takes longer
            than the first number of seconds, or it all does than the second.
        budget_s: of the whole search, what `record` has spent included.
        tell: what comes next, and how much of the budget is spent, 0 to 1.
    """

    def __init__(
        self,
        outlook: Outlook,
        choices: Choices,
        record: Record,
        measure: Measure,
        budget_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        tell: Tell = lambda text, share: None,
    ) -> None:
        self._outlook = outlook
        self._choices = choices
        self._record = record
        self._measure = measure
        self._budget_s = budget_s
        self._clock = clock
        self._tell = tell
        self._began_s = clock() - record.spent_s
        self._reference: Run | None = None  # of the holder, from just before
        self._reused = 0

    @property
    def given(self) -> Setting:
        return self._outlook.given

    @property
    def holder(self) -> Setting:
        """The best so far."""
        return self._record.holder(self.given)

    def run(self) -> Outcome:
        """Search; an interruption leaves the record as it is, for `outcome`, or for another search to go on from."""
        if not self._record.runs_of(self.given):
            self._holders_run()
        ending = "nothing is left that could win"
        for challenger in self._challengers():
            if not self._affordable(2 if self._stale() else 1):
                ending = "the budget is spent"
                break
            self._duel(challenger)
        self._confirm()
        return self.outcome(ending)

    def outcome(self, ending: str) -> Outcome:
        """The best so far. A holder that was never compared with the given one has to be faster by all its runs."""
        given, best = self.given, self.holder
        direct = self._direct(best)
        ratio = statistics.median(direct) if direct else self._ratio(best)
        if best == given or ratio >= 1.0:
            return Outcome(given, given, 1.0, ending)
        return Outcome(given, best, ratio, ending)

    # Who is next #

    def _challengers(self) -> Iterator[Setting]:
        """The best by the plan; then what differs by one knob from the holder, or from that one, in turn.

        Of each, the best by the plan first. What was best by the plan may have lost by one of its knobs alone.
        """
        tried = {self.given, *(duel.challenger for duel in self._record.duels)}
        best = self._outlook.best(self._choices)
        if best not in tried and not self._outlook.of(best).refused:
            tried.add(best)
            yield best
        turn = 0
        while True:
            centres = (self.holder, best)
            found = next(filter(None, (self._near(centres[(turn + more) % 2], tried) for more in (0, 1))), None)
            if found is None:
                return
            turn += 1
            tried.add(found)
            yield found

    def _near(self, centre: Setting, tried: Container[Setting]) -> Setting | None:
        """The best by the plan of what differs from it by one knob, was not tried, and is not hopeless."""
        limit_s = HOPELESS * self._outlook.of(self.holder).step_s
        near = self._outlook.neighbours(centre, self._choices)
        return next((one for one in near if one not in tried and self._outlook.of(one).step_s <= limit_s), None)

    # One against another #

    def _duel(self, challenger: Setting) -> None:
        holder, ratios, why, run = self.holder, list[float](), "", None
        while not _decided(ratios, self._noise()) and not why:
            reference = self._holders_run() if self._stale() or ratios else self._reference
            assert reference is not None  # of a holder that is not stale
            self._reused += 1
            limit_s = (1 + self._noise() + CANNOT_WIN) * reference.median_s
            run = self._run(challenger, limit_s, self._left_s() - self._reserve_s())
            if run.error or not run.step_s:
                why = run.error or "no step of it ended in the time that was left"
            elif reference.median_s == float("inf"):
                why = "the configuration before does not run"
            else:
                ratios.append(run.median_s / reference.median_s)
            if not self._affordable(2):
                break
        assert run is not None  # nothing is decided without one
        won = not run.error and (_wins(ratios) if ratios else bool(run.step_s))
        self._record.duels.append(Duel(challenger, holder, tuple(ratios), won, why))
        if won:
            self._reference, self._reused = run if run.step_s else None, 0
        self._record.write()

    def _confirm(self) -> None:
        """Compare a holder that has not met the given configuration with it."""
        holder, ratios = self.holder, list[float]()
        if holder == self.given or self._direct(holder) or not self._record.runs_of(self.given):
            return
        while not ratios or (len(ratios) < _MOST_PAIRS and statistics.median(ratios) > GAIN and self._affordable(2)):
            before = self._run(self.given, float("inf"), float("inf"))
            after = self._run(holder, float("inf"), float("inf"))
            if before.error or after.error:
                break
            ratios.append(after.median_s / before.median_s)
        if not ratios:
            return
        lost = statistics.median(ratios) >= 1.0
        inverse = tuple(1 / ratio for ratio in ratios)
        self._record.duels.append(Duel(self.given, holder, inverse, lost, "compared once more in the end"))
        self._record.write()

    def _holders_run(self) -> Run:
        run = self._run(self.holder, float("inf"), self._left_s())
        if run.error and self._record.runs_of(self.holder):  # it has run before: what it took then stands for it
            run = replace(run, step_s=(self._record.median_s(self.holder),), error="")
        self._reference, self._reused = run, 0
        return run

    def _stale(self) -> bool:
        return self._reference is None or self._reused >= _REUSED

    def _run(self, setting: Setting, stop_above_s: float, within_s: float) -> Run:
        known = self._record.holder(self.given)
        what = "the given configuration" if setting == self.given else setting.words(known) or "the best so far"
        self._tell(what, self._spent_s() / self._budget_s)
        full = self._outlook.no_room(setting)
        run = Run(setting, error=full) if full else self._measure(setting, stop_above_s, within_s)
        run = replace(run, at_s=self._spent_s())
        self._record.runs.append(run)
        self._record.spent_s = self._spent_s()
        self._record.write()
        return run

    # Numbers #

    def _direct(self, setting: Setting) -> list[float]:
        """Its step over the given configuration's, where they were compared."""
        return self._record.ratios(setting, self.given)

    def _ratio(self, setting: Setting) -> float:
        before, after = self._record.median_s(self.given), self._record.median_s(setting)
        return 1.0 if before == after else after / before

    def _noise(self) -> float:
        """How much longer one run takes than another of the same setting."""
        spreads = []
        for setting in {run.setting for run in self._record.runs}:
            seen = [run.median_s for run in self._record.runs_of(setting) if not run.stopped][-_SPREAD_OVER:]
            if len(seen) > 1:
                spreads.append(max(seen) / min(seen) - 1)
        least = CLOSE if len(spreads) >= _KNOWN_BY else UNKNOWN
        return min(NOISE, max(least, statistics.median(spreads) if spreads else 0.0))

    def _spent_s(self) -> float:
        return self._clock() - self._began_s

    def _left_s(self) -> float:
        return self._budget_s - self._spent_s()

    def _reserve_s(self) -> float:
        """For the last comparison with the given configuration, if the holder has not met it."""
        if self.holder == self.given or self._direct(self.holder):
            return 0.0
        return self._run_s(self.holder) + self._run_s(self.given)

    def _run_s(self, setting: Setting) -> float:
        """What a run with it takes."""
        took = [run.took_s for run in self._record.runs_of(setting)]
        return max(took[-2:], default=0.0)

    def _affordable(self, runs: int) -> bool:
        """So many runs, of the holder or of what may beat it, which take no longer."""
        return self._left_s() - self._reserve_s() >= runs * self._run_s(self.holder)


def _decided(ratios: Sequence[float], noise: float) -> bool:
    """See [Note: what a measurement is worth]."""
    if not ratios:
        return False
    middle, margin = statistics.median(ratios), noise / len(ratios)
    if len(ratios) == 1:
        return not DECISIVE <= middle <= GAIN + 2 * margin
    if len(ratios) == 2 and min(ratios) < GAIN <= max(ratios):
        return False  # the median of two is no median
    return not GAIN - margin <= middle <= GAIN + margin or len(ratios) >= _MOST_PAIRS


def _wins(ratios: Sequence[float]) -> bool:
    if not ratios:
        return False
    if len(ratios) < 3:  # the time was up
        return max(ratios) < (DECISIVE if len(ratios) == 1 else GAIN)
    return statistics.median(ratios) < GAIN
