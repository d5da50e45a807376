"""The scheduler's events (input) and actions (output). Both refer to a unit by its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.schedule.unit_state import UnitState

# Events #
#
# An agreed event happens alike on all ranks. A local event (completions, memory, reads by the user) depends on this
# rank's own drives and memory. Only an agreed event may lead to an action that all ranks must take together.


class AgreedEvent:
    """An event that happens alike on all ranks."""

    __slots__ = ()


class LocalEvent:
    """An event that depends on this rank's own drives, memory and errors."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _LocalUnitEvent(LocalEvent):
    unit: UnitState


@dataclass(frozen=True, slots=True)
class PassBegins(AgreedEvent):
    """A forward pass begins."""


@dataclass(frozen=True, slots=True)
class PassEnds(AgreedEvent):
    """A backward pass, or a forward pass without a backward pass, is over.

    Attributes:
        learn: whether it was a training step. The next cycles are expected to repeat it.
    """

    learn: bool


@dataclass(frozen=True, slots=True)
class UseBegins(AgreedEvent):
    """A module is about to compute on a unit. The unit is pinned."""

    unit: UnitState


class ParametersNeeded(_LocalUnitEvent):
    """An early gather, a user or a save needs a unit's newest parameters. The unit is pinned."""


class OldParametersNeeded(_LocalUnitEvent):
    """A unit's parameters are needed in memory, without its update if one is due."""


class ParametersMade(_LocalUnitEvent):
    """A new unit has its first values, in memory."""


class ParametersStale(_LocalUnitEvent):
    """A unit's parameters in memory are stale: the newest are on NVMe."""


class RoomNeeded(_LocalUnitEvent):
    """A new unit's parameters need memory that is not free."""


@dataclass(frozen=True, slots=True)
class MemoryFreed(LocalEvent):
    """Operations may have ended and released memory."""


class UpdateDue(_LocalUnitEvent):
    """A unit's update is due. It may be submitted if the parameters are in memory."""


class UpdateForeseen(_LocalUnitEvent):
    """A unit's gradients are complete, and its update is expected. It may be submitted as a speculative update."""


class GradientsNeedRoom(_LocalUnitEvent):
    """A unit's gradients need memory that is not free. Yields no action if none can be freed."""


@dataclass(frozen=True, slots=True)
class GradientsRest(LocalEvent):
    """The gradients of a unit that may spill will not change for a while."""


Event = AgreedEvent | LocalEvent

# Actions #


@dataclass(frozen=True, slots=True)
class _UnitAction:
    unit: UnitState


@dataclass(frozen=True, slots=True)
class Fetch(_UnitAction):
    """Start to bring a unit's parameters into memory. The ledger has room for them.

    Attributes:
        urgent: whether the compute thread waits for them.
    """

    urgent: bool


class AwaitFetch(_UnitAction):
    """Block until a unit's parameters are in memory, stale or not."""


class Evict(_UnitAction):
    """Drop a unit's parameters from memory. If no other copy is up to date, write them home first."""


@dataclass(frozen=True, slots=True)
class _Submission(_UnitAction):
    """Submit an update of a unit.

    Attributes:
        write: whether to write the new parameters home, tile by tile as they are updated.
        needed: time of the unit's next use. Among updates that no thread waits for, the lowest goes first.
    """

    write: bool
    needed: int


class Submit(_Submission):
    """Submit a unit's due update. Its gradients have room."""


class SubmitAhead(_Submission):
    """Submit a unit's expected update as a speculative one, for the tiles that can be rolled back."""


class UpdateOnDevice(_UnitAction):
    """Run a unit's due update on the device, which has its optimizer states."""


class AwaitUpdate(_UnitAction):
    """Block until a unit's submitted update is computed and written."""


class AwaitNewest(_UnitAction):
    """Block until a unit's parameters are in memory and updated. Their upload may still be queued on the device."""


@dataclass(frozen=True, slots=True)
class AwaitAnyUpdate:
    """Block until any one of the submitted updates has ended."""


class AwaitGradients(_UnitAction):
    """Block until a unit's gradients have arrived in host memory, from NVMe or from the device."""


class Spill(_UnitAction):
    """Start to write a unit's gradients to NVMe. `AwaitSpill` frees their memory."""


class AwaitSpill(_UnitAction):
    """Block until a unit's gradients are written, and free their memory."""


Action = _UnitAction | AwaitAnyUpdate
Actions = Iterator[Action]
