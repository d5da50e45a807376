"""What holds at every event. Each promise has a name, by which a failure is shrunk and a mutant is counted.

Most promises are checked where a performer would break them (`require`); those about all rows together, after each
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
    "ledger": "no memory is used above its budget, and its ledger counts what is in it",
    "newest": "a unit is computed on, looked at and gathered only when its newest version is in memory",
    "once": "each gradient is applied exactly once, by the update of its own step",
    "race": "nothing is read while it is written, or written while it is read",
    "order": "what leaves memory is needed later than what could have left in its place",
    "owner": "no memory of gradients has two owners",
    "lost": "nothing leaves memory that is nowhere else",
    "pinned": "what is in use stays in memory",
    "legal": "an action is asked for only where it can be performed",
    "agreed": "all ranks see the same agreed events, and gather the same units, in the same order",
    "progress": "somebody who waits waits for something that is under way",
    "bounded": "an event leads to a bounded number of actions",
    "idle": "an update that is due, in memory and has room is not left lying",
    "refusal": "what is refused for lack of memory does not fit",
    "error": "after an error the engine has failed, or is as before",
    "crash": "the last committed step is on the drives at every moment",
    "raises": "nothing raises but what a user, a drive or a budget has caused",
    "closed": "after close nothing is held",
}


class Violation(AssertionError):  # noqa: N818  (it is no error of the simulation's)
    """A promise is broken."""

    def __init__(self, promise: str, told: str) -> None:
        assert promise in PROMISES
        super().__init__(f"{promise}: {told}")
        self.promise = promise


def violate(promise: str, told: str) -> NoReturn:
    raise Violation(promise, told)


_STORED = Residency.STORED
_ABSENT = State.ABSENT


def most_actions(units: int) -> int:
    """More than any event needs: each unit evicted, fetched, updated, spilled and waited for a few times."""
    return 32 + 16 * units


def check_world(world: Performer) -> None:
    """What holds of all rows together, after an event."""
    used = 0
    for row in world.rows:
        if row.residency is not _STORED:
            used += row.nbytes if row.offloaded else 0
        elif row.ticket is not None or not row.offloaded:
            violate("pinned", f"{row.name} is updated, or stays, and is not in memory")
        if row.pins < 0:
            violate("pinned", f"{row.name} is let go more often than it was taken")
    budget = world.budget
    if used != budget.used_bytes or used > budget.capacity_bytes:
        violate("ledger", f"{used} bytes are used, {budget.used_bytes} counted, of {budget.capacity_bytes}")
    world.grads.check()
    world.staging.check()


def ready_updates(world: Performer) -> list[Row]:
    """Updates that are due and can be submitted now, one of them at least; none if one that waits has no room."""
    waiting = [row for row in world.rows if row.due is not None and row.residency is not _STORED]
    if not waiting or not all(world.grads.would_have_room(row) for row in waiting):
        return []
    return [row for row in waiting if row.ticket is None or row.begun is None]


def check_polled(ready: list[Row]) -> None:
    """Memory that was freed has been given to one of those that waited for it."""
    if all(row.due is not None and row.residency is not _STORED for row in ready):
        violate("idle", f"the update of {ready[0].name} is due and could be submitted")


def check_newest(row: Row) -> None:
    """The unit may be computed on now."""
    if row.residency is not Residency.RESIDENT:
        violate("newest", f"{row.name} is used, and is {row.residency.name}")
    if row.due is not None or (row.ticket is not None and not row.ticket.computed):
        violate("newest", f"{row.name} is used before its update is computed")
    if row.fetch is not None and not row.fetch.done:
        violate("race", f"{row.name} is used while it is read")
    if any(version != row.wanted for version in row.mem):
        violate("newest", f"{row.name} is used at {row.mem}, and the newest is {row.wanted}")


def check_at_rest(world: Performer) -> None:
    """Every update was carried out, and everything is where it belongs."""
    for row in world.rows:
        arrives = row.fetch is not None and (not row.fetch.done or row.fetch.failed)  # nobody may have waited for it
        values = row.home if row.residency is _STORED or row.stale or arrives else row.mem
        if row.due is not None or row.ticket is not None or row.speculative is not None:
            violate("once", f"an update of {row.name} is left behind")
        if any(version != row.wanted for version in values):
            violate("once", f"{row.name} has had updates {values}, and {row.wanted} were asked for")
        world.states.check_at(row.index, row.updates)


def check_closed(world: Performer) -> None:
    """Nothing is held any more."""
    if world.budget.used_bytes:
        violate("closed", f"{world.budget.used_bytes} bytes are counted as used")
    held = [row.name for row in world.rows if row.pins or row.gradients_are_used or row.gradients is not _ABSENT]
    held += [row.name for row in world.rows if row.host_pins]
    if held or world.grads.store.leased or world.worker.queue or world.clock.is_busy:
        violate("closed", f"{held} are held, or operations are under way")


def check_committed(world: Performer) -> None:
    """A process that dies now can go on from the step that was committed last."""
    for row in world.rows if world.committed is not None else ():
        for here, other, version in zip(row.home, row.kept, row.protected, strict=True):
            if version not in (here, other):
                violate("crash", f"version {version} of {row.name} is committed, and the drive has {here}, {other}")
    if world.committed is not None:
        world.states.check_committed()
