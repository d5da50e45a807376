"""The device path with one of its waits taken away: what should not go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import infinity
from infinity.kernels import GradStats
from infinity.tiers import AcceleratorLink, link
from infinity.tiers.grads import Arrival
from infinity.tiers.norms import ArrivingStats
from tests.behaviour.reference import Placement, Recipe
from tests.device import simdev
from tests.device.training import CRAWL, SPEEDS, engine_on, tiny, train_here


class _Hasty(link._EventToken):
    """A copy whose end the host does not wait for; streams do."""

    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None


def _hasty(copy: Callable[..., Any]) -> Callable[..., Any]:
    def started(self: AcceleratorLink, *tensors: Any) -> link._EventToken:
        token = copy(self, *tensors)
        return _Hasty(token._start, token.end, token._clock)

    return started


def nothing() -> None:
    """The path as it is."""


def compute_does_not_wait_for_uploads() -> None:
    AcceleratorLink.compute_waits = lambda self, token: None


def uploads_do_not_wait_for_compute() -> None:
    def upload(
        self: AcceleratorLink, target: torch.Tensor, source: torch.Tensor, after: object = None
    ) -> link._EventToken:
        with link.on_stream(self._up):
            target.copy_(source, non_blocking=True)
        return link._EventToken(None, self._record(self._up), self._clock)

    AcceleratorLink.upload = upload


def uploads_wait_for_what_came_before_the_update_alone() -> None:
    """As if nothing used the old values while the new ones are made."""
    mark = AcceleratorLink.mark
    first: list[Any] = []

    def stale(self: AcceleratorLink) -> Any:
        first.append(mark(self))
        return first[0]

    AcceleratorLink.mark = stale


def host_memory_is_given_back_under_uploads() -> None:
    AcceleratorLink.upload = _hasty(AcceleratorLink.upload)


def downloads_are_used_before_they_are_done() -> None:
    """Of parameters, before the optimizer changes them; of activations, before they are written to a drive."""
    AcceleratorLink.download = _hasty(AcceleratorLink.download)


def gradients_are_used_before_they_are_done() -> None:
    Arrival.has_come = lambda self: True
    Arrival.result = lambda self: None
    ArrivingStats.stats = lambda self, counters: GradStats(1.0, finite=True)


def gradients_are_given_back_under_downloads() -> None:
    """The device uses their memory for others."""
    add = Arrival.add
    Arrival.add = lambda self, copy, source: add(self, copy, torch.empty(0))


def run(mutant: str, placement: Placement, recipe: Recipe, speed: str, tiering: dict[str, Any]) -> dict[str, Any]:
    """Train with a mutant, in a process that has no other use."""
    simdev.load()
    globals()[mutant]()
    simdev.configure(check=1, **(SPEEDS | CRAWL)[speed])
    seen: dict[str, Any] = {"error": None, "result": None}
    try:
        with engine_on("simdev", tiny(), recipe, placement, **tiering) as engine:
            seen["result"] = train_here(engine, recipe)
    except (infinity.InfinityError, RuntimeError) as error:
        seen["error"] = repr(error)
    return seen | {"races": simdev.counts()["races"]}
