"""Two worlds in which operations end at fixed points, so that decisions depend on nothing but the program.

`prompt`: whoever asks whether an operation has ended waits for it: all have ended when they are looked at.
`late`: no operation has ended before somebody waits for it. The optimizer works only while somebody waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from infinity.io.interface import IoFuture
from infinity.optim import pipeline as pipeline_module
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import UpdateTicket
from infinity.tiers.grads import Arrival
from infinity.tiers.link import _EventToken
from infinity.zero import build, in_flight

WORLDS = ("prompt", "late")


class _NoThread:
    def join(self, timeout: float | None = None) -> None:
        return None


class _Transfers:
    """Has transfers end as the world says. They keep the fact that somebody has waited in a set, by identity."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: str) -> None:
        self._waited: set[int] = set()
        self._kept: list[Any] = []  # so that no identity is used again
        for kind in (*_all_subclasses(IoFuture), _EventToken):
            if "result" in vars(kind):
                self._patch(monkeypatch, kind, world)
        if world == "late":
            monkeypatch.setattr(Arrival, "has_come", lambda arrival: all(c.done() for c, _ in arrival._copies))

    def _patch(self, monkeypatch: pytest.MonkeyPatch, kind: Any, world: str) -> None:
        wait = kind.result

        def result(transfer: Any, *args: Any) -> Any:
            # What a thread beside the training waits for, such as the one that commits steps, ends when it likes.
            beside = threading.current_thread().name.startswith("infinity-")
            if id(transfer) not in self._waited and not beside:
                self._waited.add(id(transfer))
                self._kept.append(transfer)
            return wait(transfer, *args)

        def ended(transfer: Any) -> bool:
            try:
                wait(transfer)
            except Exception:  # whoever waits for it is told
                return True
            return True

        monkeypatch.setattr(kind, "result", result)
        monkeypatch.setattr(kind, "done", ended if world == "prompt" else lambda each: id(each) in self._waited)


def _all_subclasses(kind: type) -> list[type]:
    return [each for direct in kind.__subclasses__() for each in (direct, *_all_subclasses(direct))]


class _Inline(UpdatePipeline):
    """The optimizer's worker on the thread that waits for it."""

    world = "prompt"
    current: list[_Inline] = []  # noqa: RUF012  (the newest last)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.current.append(self)

    def work(self, until: Callable[[], bool]) -> None:
        """Go through the worker's loop until this holds, or there is nothing left to update."""
        while self._queue and not until():
            self._ring.reap()
            self._read_ahead()
            ticket = self._next_ticket()
            assert ticket is not None
            self._advance(ticket)

    def submit(self, ticket: UpdateTicket) -> None:
        super().submit(ticket)
        if self.world == "prompt":
            self.work(lambda: False)

    def wait_computed(self, ticket: UpdateTicket, reached: Callable[[int], None] | None = None) -> None:
        self._queue.hurry(ticket)
        while not ticket.computed.done():
            before = ticket.reached
            self.work(lambda before=before: ticket.computed.done() or ticket.reached > before)  # type: ignore[misc]
            if reached is not None:
                reached(ticket.reached)
        ticket.computed.result()

    def _run_in_worker(self, task: Callable[[], None]) -> None:
        task()

    def _park(self) -> None:
        if self._queue:
            raise RuntimeError("optimizer states cannot be visited while updates are queued")
        self._queue.expect(())
        self._ring.clear()

    def _stop(self, timeout_s: float | None = None) -> None:
        self._closing = True
        self.work(lambda: False)


class _Ended(deque[int]):
    """Units whose updates have ended; who waits for the next one has the optimizer work."""

    def put(self, unit: int) -> None:
        self.append(unit)

    def get(self) -> int:
        _Inline.current[-1].work(lambda: bool(self))
        return self.popleft()

    def empty(self) -> bool:
        return not self


@contextmanager
def world_of(world: str) -> Iterator[None]:
    """Engines that are made inside live in this world, and in one thread."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _Transfers(monkeypatch, world)
        monkeypatch.setattr(pipeline_module, "start_thread", lambda *_: _NoThread())
        monkeypatch.setattr(_Inline, "world", world)
        monkeypatch.setattr(build, "UpdatePipeline", _Inline)
        monkeypatch.setattr(in_flight, "SimpleQueue", _Ended)
        try:
            yield
        finally:
            _Inline.current.clear()
