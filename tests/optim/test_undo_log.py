"""Room for what updates replace: as much as was promised, and memory that was used before is used first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.memory import ALIGN_BYTES as PAGE
from infinity.optim.undo_log import Image, UndoLog


@pytest.fixture
def images():
    images = UndoLog(6 * PAGE)
    yield images
    images.close()


def test_what_is_promised_is_there_when_it_is_taken(images) -> None:
    waiting = [Image(2 * PAGE, PAGE), Image(2 * PAGE, PAGE)]
    for image in waiting:
        assert images.room().draw(image.sizes)
        images.promise(image)
    assert not images.room().draw([PAGE])
    for image in waiting:
        images.take(image)
    places = [place for image in waiting for place in (image.fields, image.param)]
    assert len({place.address for place in places}) == 4
    images.give_back(waiting[0])
    assert images.room().draw(waiting[0].sizes)
    assert not images.room().draw([*waiting[0].sizes, PAGE])


def test_the_place_that_was_used_last_is_used_next(images) -> None:
    used, waits = Image(2 * PAGE, 0), Image(2 * PAGE, 0)
    for image in (waits, used):  # in the order in which gradients come, which is not that of the updates
        images.promise(image)
    images.take(used)
    address = used.fields.address
    for image in (used, waits):
        images.give_back(image)
    again, other = Image(2 * PAGE, 0), Image(2 * PAGE, 0)
    for image in (other, again):
        images.promise(image)
    images.take(again)
    assert again.fields.address == address


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_promises_are_kept_in_any_order(asked) -> None:
    images = UndoLog(8 * PAGE)
    promised: list[Image] = []
    taken: list[Image] = []
    for pages, wants in asked:
        if wants:
            image = Image(pages * PAGE, PAGE)
            if images.room().draw(image.sizes):
                images.promise(image)
                promised.append(image)
        elif promised and pages:
            image = promised.pop(pages % len(promised))
            images.take(image)
            taken.append(image)
        elif taken or promised:
            images.give_back((taken or promised).pop())
        held = [place for image in taken for place in (image.fields, image.param) if place is not None]
        assert len({place.address for place in held}) == len(held)
        assert sum(sum(image.sizes) for image in promised + taken) <= images.arena.capacity_bytes
    images.close()
