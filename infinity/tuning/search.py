"""Search for the fastest setting: measure settings with good predictions in turn with the fastest one so far.

[Note: what a measurement is worth]
Other work on the machine can make the same step take half as long again, for minutes. So a challenger is compared with
a run of the holder (the fastest setting so far) from just before, never with an older one. It wins if its step is
shorter than `GAIN` times the holder's, in the median of two to five such pairs. The more the runs of one setting differ
(the noise), the more pairs are needed. One pair is enough if the challenger takes less than half the time, or longer by
more than twice the noise; its process is stopped as soon as even its fastest step shows this. While fewer than
`_KNOWN_BY` settings have run more than once, the noise is assumed to be at least `UNKNOWN`. If the holder was never
compared with the given configuration directly, this is done before it is returned.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from infinity.tuning.outlook import Outlook
from infinity.tuning.record import Duel, Record, Run
from infinity.tuning.space import Choices, Setting

GAIN = 0.97  # the share of the holder's step that a challenger must stay below to win
CLOSE, NOISE = 0.05, 0.3  # the least and the most noise that is assumed
UNKNOWN = 0.15  # the least noise while fewer than `_KNOWN_BY` settings have run more than once
_KNOWN_BY = 3
DECISIVE = 0.5  # below this ratio, one pair is enough
CANNOT_WIN = 0.1  # a run is stopped if its fastest step exceeds the holder's median by the noise and this share
HOPELESS = 1.5  # predicted steps above so many times the holder's are not measured; predictions are wrong by a fifth
_MOST_PAIRS = 5
_SPREAD_OVER = 4  # the last runs of a setting, from which its noise is computed
_REUSED = 2  # challengers that one run of the holder is compared with

Measure = Callable[[Setting, float, float], Run]
Tell = Callable[[str, float], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a search.

    Attributes:
        best: the fastest setting; the given one if none is faster.
        ratio: its step divided by that of the given setting, of consecutive runs if there are any; 1.0 for the given
            setting, 0.0 if that did not run.
        ending: why the search ended, in words.
    """

    given: Setting
    best: Setting
    ratio: float
    ending: str


class Search:
    """Measures settings until none is left that could win, or the time is up.

    Args:
        measure: trains a few steps with a setting, in a process of its own. The process is stopped when its fastest
            step takes longer than the first number of seconds, or the whole run longer than the second.
        budget_s: seconds for the whole search, including those that `record` has spent.
        tell: called with the next measurement, and the share of the budget that is spent, 0 to 1.
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
        self._reference: Run | None = None  # the holder's last run
        self._reused = 0

    @property
    def given(self) -> Setting:
        return self._outlook.given

    @property
    def holder(self) -> Setting:
        """The fastest setting so far."""
        return self._record.holder(self.given)

    def run(self) -> Outcome:
        """Search. After an interruption, `outcome` or another search can use the record."""
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
        """Return the fastest setting so far. Without direct comparisons with the given one, the medians of all runs
        decide."""
        given, best = self.given, self.holder
        direct = self._direct(best)
        ratio = statistics.median(direct) if direct else self._ratio(best)
        if best == given or ratio >= 1.0:
            return Outcome(given, given, 1.0, ending)
        return Outcome(given, best, ratio, ending)

    # Challengers #

    def _challengers(self) -> Iterator[Setting]:
        """Yield the setting that is predicted to be fastest, then settings that differ by one knob.

        They differ from the holder and from the predicted setting, in turn, the best prediction first: the predicted
        setting may have lost because of a single knob.
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
        """Return the untried setting with the best prediction that differs by one knob; None if none is promising."""
        limit_s = HOPELESS * self._outlook.of(self.holder).step_s
        near = self._outlook.neighbours(centre, self._choices)
        return next((one for one in near if one not in tried and self._outlook.of(one).step_s <= limit_s), None)

    # Duels #

    def _duel(self, challenger: Setting) -> None:
        holder, ratios, why, run = self.holder, list[float](), "", None
        while not _decided(ratios, self._noise()) and not why:
            reference = self._holders_run() if self._stale() or ratios else self._reference
            assert reference is not None  # because the holder's run is not stale
            self._reused += 1
            limit_s = (1 + self._noise() + CANNOT_WIN) * reference.median_s
            run = self._run(challenger, limit_s, self._left_s() - self._reserve_s())
            if run.error or not run.step_s:
                why = run.error or "it did not finish a step in the time that was left"
            elif reference.median_s == float("inf"):
                why = "the configuration before does not run"
            else:
                ratios.append(run.median_s / reference.median_s)
            if not self._affordable(2):
                break
        assert run is not None  # the loop has run at least once
        won = not run.error and (_wins(ratios) if ratios else bool(run.step_s))
        self._record.duels.append(Duel(challenger, holder, tuple(ratios), won, why))
        if won:
            self._reference, self._reused = run if run.step_s else None, 0
        self._record.write()

    def _confirm(self) -> None:
        """Compare the holder with the given configuration, unless this was done before."""
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
        if run.error and self._record.runs_of(self.holder):  # use the median of its earlier runs instead
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
        """Return its step divided by the given configuration's, for each pair of runs that compared them."""
        return self._record.ratios(setting, self.given)

    def _ratio(self, setting: Setting) -> float:
        before, after = self._record.median_s(self.given), self._record.median_s(setting)
        return 1.0 if before == after else after / before

    def _noise(self) -> float:
        """Return by which share one run takes longer than another of the same setting."""
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
        """Return the seconds for the last comparison with the given configuration; 0 if that was done."""
        if self.holder == self.given or self._direct(self.holder):
            return 0.0
        return self._run_s(self.holder) + self._run_s(self.given)

    def _run_s(self, setting: Setting) -> float:
        """Return the seconds that a run with this setting takes."""
        took = [run.took_s for run in self._record.runs_of(setting)]
        return max(took[-2:], default=0.0)

    def _affordable(self, runs: int) -> bool:
        """Whether there is time for so many runs of the holder. Runs of settings that may win take no longer."""
        return self._left_s() - self._reserve_s() >= runs * self._run_s(self.holder)


def _decided(ratios: Sequence[float], noise: float) -> bool:
    """Whether these pairs are enough, see [Note: what a measurement is worth]."""
    if not ratios:
        return False
    middle, margin = statistics.median(ratios), noise / len(ratios)
    if len(ratios) == 1:
        return not DECISIVE <= middle <= GAIN + 2 * margin
    if len(ratios) == 2 and min(ratios) < GAIN <= max(ratios):
        return False  # one pair wins and one loses: a third one decides
    return not GAIN - margin <= middle <= GAIN + margin or len(ratios) >= _MOST_PAIRS


def _wins(ratios: Sequence[float]) -> bool:
    if not ratios:
        return False
    if len(ratios) < 3:  # the time was up
        return max(ratios) < (DECISIVE if len(ratios) == 1 else GAIN)
    return statistics.median(ratios) < GAIN
