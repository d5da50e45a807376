"""What an interrupt leaves half way stays known, whatever follows."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from infinity.memory import Arena, HandingOver, hand_over

_TRACED = (__file__, hand_over.__file__)


class Books:
    """Something that passes from one owner to the next in a hand-over within a hand-over."""

    def __init__(self) -> None:
        self.handing_over = HandingOver()
        self.giver, self.taker = ["it"], list[str]()

    def pass_on(self) -> None:
        with self.handing_over:
            item = self.giver.pop()
            with self.handing_over:
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
        known = books.handing_over.torn
        assert known or len(books.giver) + len(books.taker) == 1, line
        books.giver, books.taker = ["another"], []
        books.pass_on()
        assert books.handing_over.torn == known, "what follows must not make it whole"
        line += 1
    assert line > 6
    assert books.taker == ["it"]
    assert not books.handing_over.torn


def test_catching_an_interrupt_inside_an_ownership_transfer_does_not_complete_it() -> None:
    handing_over = HandingOver()
    with handing_over, suppress(ValueError), handing_over:
        raise ValueError
    assert handing_over.torn


def test_leaving_early_is_no_interrupt() -> None:
    def found(handing_over: HandingOver) -> int:
        for number in range(3):
            with handing_over:
                if number == 0:
                    continue
                return number
        return 0

    handing_over = HandingOver()
    assert found(handing_over) == 1
    assert not handing_over.torn


def test_what_is_half_way_otherwise_can_be_said() -> None:
    handing_over = HandingOver()
    handing_over.tear()
    with handing_over:
        pass
    assert handing_over.torn


def test_all_parts_of_an_arena_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is half made in a part of it is known of the whole."""
    arena = Arena(1 << 20)
    part = arena.part(1 << 16)
    assert part.handing_over is arena.handing_over
    monkeypatch.setattr(part._free, "take", lambda _, at_end: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        part.try_lease(4096)
    assert arena.handing_over.torn
    arena.close()
