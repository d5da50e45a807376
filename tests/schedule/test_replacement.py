"""What the plan replaces is what looking at every resident unit at every fetch would choose, in nearly linear time."""

from __future__ import annotations

import sys
from types import FrameType

from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.schedule import make_plan
from infinity.schedule.plan import _Replacement


class _EveryResident:
    """The specification: what is needed farthest ahead is found by sorting all that is resident."""

    def __init__(self, uses: list[int], sizes: list[int], capacity_bytes: int) -> None:
        self._uses, self._sizes, self._capacity_bytes = uses, sizes, capacity_bytes
        self._last_use: dict[int, int] = {}
        self._last_start = 0
        self.resident: set[int] = set()
        self.fetches: list[tuple[int, tuple[int, ...], int, int, bool]] = []

    def use(self, now: int) -> None:
        unit, following = self._uses[now % len(self._uses)], self._uses[(now + 1) % len(self._uses)]
        if unit not in self.resident:
            self._fetch(unit, now, keep={unit}, on_the_spot=True)
        self._last_use[unit] = now
        others = sum(self._sizes[other] for other in self.resident if other != unit)
        if following not in self.resident and self._free() + others >= self._sizes[following]:
            self._fetch(following, now, keep={unit, following}, on_the_spot=False)

    def _free(self) -> int:
        return self._capacity_bytes - sum(self._sizes[unit] for unit in self.resident)

    def _after(self, unit: int, now: int) -> int:
        return next(t for t in range(now + 1, now + 1 + len(self._uses)) if self._uses[t % len(self._uses)] == unit)

    def _fetch(self, unit: int, now: int, keep: set[int], on_the_spot: bool) -> None:
        victims = self._victims(unit, now, keep)
        self._last_start = now if on_the_spot else self._last_start
        self._last_start = max([self._last_start, *(self._last_use.get(victim, -1) + 1 for victim in victims)])
        self.resident = self.resident - set(victims) | {unit}
        self.fetches.append((unit, tuple(victims), self._last_start, now + (not on_the_spot), on_the_spot))

    def _victims(self, unit: int, now: int, keep: set[int]) -> list[int]:
        victims = []
        missing = self._sizes[unit] - self._free()
        for victim in sorted(self.resident - keep, key=lambda other: (-self._after(other, now), other)):
            if missing <= 0:
                break
            victims.append(victim)
            missing -= self._sizes[victim]
        for victim in reversed(victims.copy()):
            if missing + self._sizes[victim] <= 0:
                victims.remove(victim)
                missing += self._sizes[victim]
        return victims


@settings(max_examples=500)
@given(st.data())
def test_every_decision_is_that_of_the_specification(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    passes = [*range(len(sizes)), *reversed(range(len(sizes)))]
    uses = data.draw(st.just(passes) | st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=24))
    capacity = data.draw(st.integers(max(sizes), sum(sizes) + 3))
    made, specified = _Replacement(uses, sizes, capacity), _EveryResident(uses, sizes, capacity)
    for now in range(5 * len(uses)):
        made.use(now)
        specified.use(now)
        assert made.resident == specified.resident
    assert [(f.unit, f.victims, f.start, f.needed, f.on_the_spot) for f in made.fetches] == specified.fetches


def test_ten_times_as_many_units_take_little_more_than_ten_times_as_many_calls() -> None:
    """Calls are counted, not seconds: on a busy machine a quotient of short times says nothing."""

    def calls(units: int) -> int:
        sizes = [100 + index * 37 % 50 for index in range(units)]
        counted = 0

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal counted
            counted += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            make_plan([*range(units), *reversed(range(units))], sizes, sum(sizes) // 10)
        finally:
            sys.setprofile(before)
        return counted

    assert calls(3000) < 12 * calls(300)
