"""What autograd saved is on its way to the device before backward asks for it, and never more than the two largest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from infinity.errors import CapacityError
from infinity.telemetry import Counters
from infinity.tiers import ActivationStore, SameMemory, Transfer

NUMEL, COUNT = 16 << 10, 6  # float32: 64 KiB each


class Recording(SameMemory):
    """A link that notes what is asked of it, by the tensors' first value."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._uploads: list[tuple[Transfer, int]] = []

    def upload(self, target: torch.Tensor, source: torch.Tensor, after: Transfer | None = None) -> Transfer:
        token = super().upload(target, source, after)
        number = int(source.view(-1)[0])
        self._uploads.append((token, number))
        self.log.append(("upload", number))
        return token

    def compute_waits(self, token: Transfer) -> None:
        self.log.append(("wait", next(number for known, number in self._uploads if known is token)))


class Saved(torch.autograd.Function):
    """Saves a tensor and passes gradients on."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad + kept.mean(), None


@pytest.fixture
def link() -> Recording:
    return Recording()


@pytest.fixture
def store(link):
    made = ActivationStore(link, 4 << 20, None, (), Counters())
    yield made
    made.close()


def saved(store: ActivationStore, numels: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of a chain that has saved tensors of so many elements, whose values are their numbers."""
    x = torch.zeros(4, requires_grad=True)
    y = x
    with store.saving():
        for number, numel in enumerate(numels):
            y = Saved.apply(y, torch.full((numel,), float(number)))
    return x, y


def test_uploads_begin_before_their_tensors_are_asked_for(store, link) -> None:
    x, y = saved(store, [NUMEL] * COUNT)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 1.0 + sum(range(COUNT))))
    for number in range(COUNT - 1):
        begins, asked = link.log.index(("upload", number)), link.log.index(("wait", number + 1))
        assert begins < link.log.index(("wait", number)), "it is waited for before it has begun"
        assert begins <= asked + 2
    assert link.log.count(("upload", 0)) == 1
    del y
    assert store.count == 0
    assert store._ahead_bytes == 0


def test_two_of_the_largest_and_no_more_are_unsharded_early(store, link) -> None:
    saved_numels = [NUMEL] * COUNT + [2 * NUMEL]
    _, y = saved(store, saved_numels)
    y.sum().backward()
    waits = [index for index, (what, _) in enumerate(link.log) if what == "wait"]
    for index in waits:
        uploaded = {number for what, number in link.log[:index] if what == "upload"}
        used = {number for what, number in link.log[:index] if what == "wait"}
        assert sum(saved_numels[number] for number in uploaded - used) <= 2 * 2 * NUMEL + saved_numels[0]


def test_what_is_dropped_is_behind_its_upload(store, link) -> None:
    """Its memory on the device may be given to others then."""
    _, y = saved(store, [NUMEL] * COUNT)
    node = y.grad_fn
    (kept,) = node.saved_tensors
    assert kept[0] == COUNT - 1
    ahead = {number for what, number in link.log if what == "upload"} - {COUNT - 1}
    assert ahead
    del y, node, kept
    assert store.count == 0
    assert ahead <= {number for what, number in link.log if what == "wait"}
    assert store._ahead_bytes == 0


def test_a_device_without_room_uploads_when_it_is_asked(store, link, monkeypatch) -> None:
    real, calls = torch.empty_strided, []

    def full(*args, **more):
        calls.append(args)
        if len(calls) % 2 == 0:  # one is asked for, and the next one is to come ahead
            raise torch.OutOfMemoryError("no room")
        return real(*args, **more)

    x, y = saved(store, [NUMEL] * COUNT)
    monkeypatch.setattr("infinity.tiers.activations.torch.empty_strided", full)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 1.0 + sum(range(COUNT))))


def test_an_activation_without_room_says_what_to_set(store) -> None:
    entry = cast(Any, SimpleNamespace(nbytes=4 * NUMEL))
    words = r"no 64.00 KiB in one piece .*activation_memory, 4.00 MiB: raise it to 4.07MiB or more"
    with store.arena.lease(store.arena.capacity_bytes), pytest.raises(CapacityError, match=words):
        store._needed_room(entry)
