"""The promises that hold at every event. Failures are shrunk, and mutants are counted, by the name of the promise.

Most promises are checked where a performer could break them. Those about all rows together are checked after each
event (`check_world`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from infinity.schedule.unit_state import Residency
from infinity.tiers.copies import State

if TYPE_CHECKING:
    from infinity.simulation.performer import Performer
    from infinity.simulation.rows import Row

PROMISES = {
    "ledger": "no memory is used above its budget, and its ledger counts every byte that is used",
    "newest": "a unit is computed on, read and gathered only when its newest version is in memory",
    "once": "each gradient is applied exactly once, by the update of its own step",
    "race": "nothing is read while it is written, or written while it is read",
    "order": "an evicted unit is needed later than every other unit that could have been evicted",
    "owner": "no gradient memory has two owners",
    "lost": "a value leaves memory only if it has another copy",
    "pinned": "a unit in use stays in memory",
    "legal": "an action is requested only if it can be performed",
    "agreed": "all ranks see the same agreed events, and gather the same units, in the same order",
    "progress": "every wait is for an operation that is in flight",
    "bounded": "an event causes a bounded number of actions, and a bounded number of checks for free memory",
    "idle": "an update is submitted once it is due, its unit is in memory, and its gradients have room",
    "refusal": "a request is refused for lack of memory only if it cannot fit",
    "error": "after an error, the engine has stopped, or its state is unchanged",
    "crash": "the last committed step is on the drives at every moment",
    "raises": "every exception is caused by a user, a drive or a budget",
    "closed": "after close nothing is held",
}


class Violation(AssertionError):  # noqa: N818  (the scheduler has an error, not the simulation)
    """A promise is broken."""

    def __init__(self, promise: str, what: str) -> None:
        assert promise in PROMISES
        super().__init__(f"{promise}: {what}")
        self.promise = promise


def violate(promise: str, what: str) -> NoReturn:
    raise Violation(promise, what)


_STORED = Residency.STORED
_ABSENT = State.ABSENT


def most_actions(units: int) -> int:
    """Return more actions than any event needs: evict, fetch, update, spill and await each unit a few times."""
    return 32 + 16 * units


def check_world(world: Performer) -> None:
    """Check the promises about all rows together, after an event."""
    used = 0
    for row in world.rows:
        if row.residency is not _STORED:
            used += row.nbytes if row.offloaded else 0
        elif row.ticket is not None or not row.offloaded:
            violate("pinned", f"{row.name} is being updated, or is never evicted, but is not in memory")
        if row.pins < 0:
            violate("pinned", f"{row.name} is unpinned more often than it was pinned")
    budget = world.budget
    if used != budget.used_bytes or used > budget.capacity_bytes:
        violate("ledger", f"{used} bytes are used, {budget.used_bytes} counted, of {budget.capacity_bytes}")
    world.grads.check()
    world.staging.check()


def ready_updates(world: Performer) -> list[Row]:
    """Return due updates of which at least one can be submitted now; none if the gradients of one have no room."""
    waiting = [row for row in world.rows if row.due is not None and row.residency is not _STORED]
    if not waiting or not all(world.grads.would_have_room(row) for row in waiting):
        return []
    return [row for row in waiting if row.ticket is None or row.begun is None]


def check_polled(ready: list[Row]) -> None:
    """Check after a poll that at least one of the updates in `ready` was submitted."""
    if all(row.due is not None and row.residency is not _STORED for row in ready):
        violate("idle", f"the update of {ready[0].name} is due and could be submitted")


def check_newest(row: Row) -> None:
    """Check that a module may compute on the unit now."""
    if row.residency is not Residency.RESIDENT:
        violate("newest", f"{row.name} is used, and is {row.residency.name}")
    if row.due is not None or (row.ticket is not None and not row.ticket.computed):
        violate("newest", f"{row.name} is used before its update is computed")
    if row.fetch is not None and not row.fetch.done:
        violate("race", f"{row.name} is used while it is read")
    if any(version != row.wanted for version in row.mem):
        violate("newest", f"{row.name} is used at {row.mem}, and the newest is {row.wanted}")


def check_at_rest(world: Performer) -> None:
    """Check after a drain that every update was applied once, and that no value is stale."""
    for row in world.rows:
        arrives = row.fetch is not None and (not row.fetch.done or row.fetch.failed)  # a fetch that was not awaited
        values = row.home if row.residency is _STORED or row.stale or arrives else row.mem
        if row.due is not None or row.ticket is not None or row.speculative is not None:
            violate("once", f"an update of {row.name} is not finished")
        if any(version != row.wanted for version in values):
            violate("once", f"{row.name} is at versions {values}, and {row.wanted} is the newest")
        world.states.check_at(row.index, row.updates)


def check_closed(world: Performer) -> None:
    """Check after close that no memory, pin or operation is left."""
    if world.budget.used_bytes:
        violate("closed", f"{world.budget.used_bytes} bytes are counted as used")
    held = [row.name for row in world.rows if row.pins or row.gradients_are_used or row.gradients is not _ABSENT]
    held += [row.name for row in world.rows if row.host_pins]
    if held or world.grads.store.leased or world.worker.queue or world.clock.is_busy:
        violate("closed", f"{held} are held, or operations are in flight")


def check_committed(world: Performer) -> None:
    """Check that a process that dies now could continue from the step that was committed last."""
    for row in world.rows if world.committed is not None else ():
        for here, other, version in zip(row.home, row.kept, row.protected, strict=True):
            if version not in (here, other):
                violate("crash", f"version {version} of {row.name} is committed, and the drive has {here}, {other}")
    if world.committed is not None:
        world.states.check_committed()
