"""What an interrupt leaves half way stays known, whatever follows."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from infinity.memory import Arena, CriticalSection, critical_section

_TRACED = (__file__, critical_section.__file__)


class Books:
    """Something that passes from one owner to the next in a hand-over within a hand-over."""

    def __init__(self) -> None:
        self.critical = CriticalSection()
        self.giver, self.taker = ["it"], list[str]()

    def pass_on(self) -> None:
        with self.critical:
            item = self.giver.pop()
            with self.critical:
                self.taker.append(item)


def interrupted_at(count: int, books: Books) -> bool:
    """Ctrl-C at this line of `pass_on`, those of the context's own methods included; False if it has fewer lines."""
    left = [count]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in _TRACED:  # a callback of the garbage collection, for example
            return None
        if event == "line":
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        books.pass_on()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_line_leaves_it_with_one_owner_or_is_known() -> None:
    line = 0
    while interrupted_at(line, books := Books()):
        known = books.critical.interrupted
        assert known or len(books.giver) + len(books.taker) == 1, line
        books.giver, books.taker = ["another"], []
        books.pass_on()
        assert books.critical.interrupted == known, "what follows must not make it whole"
        line += 1
    assert line > 6
    assert books.taker == ["it"]
    assert not books.critical.interrupted


def test_catching_an_interrupt_inside_an_ownership_transfer_does_not_complete_it() -> None:
    critical = CriticalSection()
    with critical, suppress(ValueError), critical:
        raise ValueError
    assert critical.interrupted


def test_leaving_early_is_no_interrupt() -> None:
    def found(critical: CriticalSection) -> int:
        for number in range(3):
            with critical:
                if number == 0:
                    continue
                return number
        return 0

    critical = CriticalSection()
    assert found(critical) == 1
    assert not critical.interrupted


def test_what_is_half_way_otherwise_can_be_said() -> None:
    critical = CriticalSection()
    critical.mark_interrupted()
    with critical:
        pass
    assert critical.interrupted


def test_what_was_rolled_back_is_not_half_way() -> None:
    critical = CriticalSection()
    with suppress(ValueError), critical:
        critical.note_rollback()
        raise ValueError
    assert not critical.interrupted
    with critical:
        pass
    assert not critical.interrupted


def test_all_parts_of_an_arena_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is half made in a part of it is known of the whole."""
    arena = Arena(1 << 20)
    part = arena.part(1 << 16)
    assert part.critical is arena.critical
    monkeypatch.setattr(part._free, "take", lambda _, at_end: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part.try_lease(4096)
    assert arena.critical.interrupted
    arena.close()
