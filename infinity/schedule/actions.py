"""What the scheduler is told, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Events #
#
# Agreed events happen alike on all ranks; local ones (completions, memory, what a user looks at) follow each rank's own
# drives and memory. Only an agreed event may lead to something that all ranks must do together.


class AgreedEvent:
    """Happens alike on all ranks."""

    __slots__ = ()


class LocalEvent:
    """Follows this rank's own drives, memory and errors."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PassBegins(AgreedEvent):
    """A forward pass begins."""


@dataclass(frozen=True, slots=True)
class PassEnds(AgreedEvent):
    """The backward pass is over, or the forward pass had none.

    Attributes:
        learn: it was a training step; what follows will probably be like it.
    """

    learn: bool


@dataclass(frozen=True, slots=True)
class UseBegins(AgreedEvent):
    """A module is about to compute on a unit, which is pinned."""

    unit: int


@dataclass(frozen=True, slots=True)
class ParametersNeeded(LocalEvent):
    """Somebody wants a unit's newest parameters, and has pinned them: a look-ahead, a user, a save."""

    unit: int


@dataclass(frozen=True, slots=True)
class OldParametersNeeded(LocalEvent):
    """A unit's parameters are wanted in memory as they are, without the update that may be due."""

    unit: int


@dataclass(frozen=True, slots=True)
class ParametersMade(LocalEvent):
    """A unit that had no values has its first ones, in memory."""

    unit: int


@dataclass(frozen=True, slots=True)
class ParametersStale(LocalEvent):
    """What memory has of a unit is not the newest any more, which is on the drive."""

    unit: int


@dataclass(frozen=True, slots=True)
class RoomNeeded(LocalEvent):
    """A new unit's parameters need memory that is not free."""

    unit: int


@dataclass(frozen=True, slots=True)
class MemoryFreed(LocalEvent):
    """Operations may have ended, and given memory back."""


@dataclass(frozen=True, slots=True)
class UpdateDue(LocalEvent):
    """A unit's update is due, and may be submitted if its parameters are in memory."""

    unit: int


@dataclass(frozen=True, slots=True)
class UpdateForeseen(LocalEvent):
    """A unit's gradients are complete, and its update will probably be due: it may run ahead of the norm."""

    unit: int


@dataclass(frozen=True, slots=True)
class GradientsNeedRoom(LocalEvent):
    """A unit's gradients need memory that is not free; nothing is done if none can be freed."""

    unit: int


@dataclass(frozen=True, slots=True)
class GradientsRest(LocalEvent):
    """Nothing is added for a while to the gradients of a unit that may spill."""


Event = AgreedEvent | LocalEvent

# Actions #


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to bring a unit's parameters into memory, of which the ledger has enough.

    Attributes:
        urgent: somebody waits for them.
    """

    unit: int
    urgent: bool


@dataclass(frozen=True, slots=True)
class AwaitFetch:
    """Wait until a unit's parameters are in memory, old or new."""

    unit: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop a unit's parameters from memory; those that are nowhere else are written home first."""

    unit: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the update of a unit that is due; its gradients have room.

    Attributes:
        write: the new parameters are written home, tile by tile as they are updated.
        needed: when the unit is needed next; of updates that nobody waits for the lowest goes first.
    """

    unit: int
    write: bool
    needed: int


@dataclass(frozen=True, slots=True)
class SubmitAhead:
    """Submit the update that is foreseen for a unit, as far as it can be undone; see `Submit`."""

    unit: int
    write: bool
    needed: int


@dataclass(frozen=True, slots=True)
class UpdateOnDevice:
    """Carry out the update of a unit that is due on the device, where its optimizer states are."""

    unit: int


@dataclass(frozen=True, slots=True)
class AwaitUpdate:
    """Wait until the submitted update of a unit is over: computed, and on the drives."""

    unit: int


@dataclass(frozen=True, slots=True)
class AwaitNewest:
    """Wait until a unit's parameters are in memory, updated, and in the device's queue."""

    unit: int


@dataclass(frozen=True, slots=True)
class AwaitAnyUpdate:
    """Wait until one of the submitted updates has ended, whichever is the first."""


@dataclass(frozen=True, slots=True)
class AwaitGradients:
    """Wait until a unit's gradients are in host memory, where they come from a drive or the device."""

    unit: int


@dataclass(frozen=True, slots=True)
class Spill:
    """Start to write a unit's gradients to the drive; their memory is free once that is done."""

    unit: int


@dataclass(frozen=True, slots=True)
class AwaitSpill:
    """Wait until a unit's gradients are written, and free their memory."""

    unit: int


Action = (
    Fetch
    | AwaitFetch
    | Evict
    | Submit
    | SubmitAhead
    | UpdateOnDevice
    | AwaitUpdate
    | AwaitNewest
    | AwaitAnyUpdate
    | AwaitGradients
    | Spill
    | AwaitSpill
)
Actions = Iterator[Action]
