"""The reason for the value of each knob: a measurement, or else the plan's prediction."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from infinity.tuning.outlook import Outlook
from infinity.tuning.record import Record
from infinity.tuning.space import KNOBS, TITLES, Choices, Setting, canonical, keys_of, shown


@dataclass(frozen=True)
class Reason:
    """One knob of the outcome.

    Attributes:
        knob: its name; `title` is its name in messages.
        given, chosen: its values before and after the search, as text.
        changed: new values of keys of the file, by dotted path.
        why: the reason, in words.
    """

    knob: str
    title: str
    given: str
    chosen: str
    changed: Mapping[str, Any]
    why: str


def reasons(best: Setting, outlook: Outlook, choices: Choices, record: Record) -> list[Reason]:
    return [_reason(knob, best, outlook, choices, record) for knob in KNOBS]


def _reason(knob: str, best: Setting, outlook: Outlook, choices: Choices, record: Record) -> Reason:
    before, after = getattr(outlook.given, knob), getattr(best, knob)
    if len(choices[knob]) == 1:
        why = "left as it was given"
    elif knob == "aio" and not outlook.of(best).moved_bytes:
        why = "the drives have nothing to do"
    elif before == after:
        why = _why_kept(knob, best, outlook, choices, record)
    else:
        why = _compared(knob, best, before, outlook, record)
    changed = keys_of(outlook.config, best, (knob,))
    return Reason(knob, TITLES[knob], shown(knob, before), shown(knob, after), changed, why)


def _compared(knob: str, best: Setting, value: Any, outlook: Outlook, record: Record) -> str:
    """Compare `best` with the same setting with another value of one knob, in words."""
    name = shown(knob, value)
    other = canonical(replace(best, **{knob: value}), outlook.given)
    ratios = record.ratios(other, best)
    if ratios:
        return f"measured: {_times(statistics.median(ratios))} with {name} ({_pairs(len(ratios))})"
    failed = next((run.error for run in record.runs if run.setting == other and run.error), "")
    prediction = outlook.of(other)
    if failed or prediction.refused:
        return f"{name} cannot run: {failed or prediction.refused}"
    return f"by the plan: {outlook.of(best).step_s:.3g} s a step, and {prediction.step_s:.3g} s with {name}"


def _why_kept(knob: str, best: Setting, outlook: Outlook, choices: Choices, record: Record) -> str:
    """Compare the kept value with the best of the others, in words."""
    others = [value for value in choices[knob] if value != getattr(best, knob)]
    settings = {value: canonical(replace(best, **{knob: value}), outlook.given) for value in others}

    def rank(value: Any) -> tuple[bool, float]:
        ratios = record.ratios(settings[value], best)
        return not ratios, statistics.median(ratios) if ratios else outlook.of(settings[value]).step_s

    return _compared(knob, best, min(others, key=rank), outlook, record)


def _times(ratio: float) -> str:
    return f"a step takes {ratio - 1:+.0%}" if abs(ratio - 1) >= 0.005 else "a step takes as long"


def _pairs(count: int) -> str:
    return "one pair of runs" if count == 1 else f"{count} pairs of runs"
