"""The scheduler's events (input) and actions (output). Both refer to a unit by its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.schedule.unit_state import UnitState

# Events #


@dataclass(frozen=True, slots=True)
class Event:
    """An event on this rank. Other ranks may have other events, or another order, so no action is a collective."""


@dataclass(frozen=True, slots=True)
class _UnitEvent(Event):
    unit: UnitState


@dataclass(frozen=True, slots=True)
class CycleBegins(Event):
    """A cycle begins, with its forward pass."""


@dataclass(frozen=True, slots=True)
class CycleEnds(Event):
    """A cycle is over: a forward and a backward pass, or a forward pass without one.

    Attributes:
        learn: whether it was a training step. The next cycles are expected to repeat it.
    """

    learn: bool


class UseBegins(_UnitEvent):
    """A module is about to compute on a unit. The unit is pinned."""


class ParametersNeeded(_UnitEvent):
    """An early gather, a user or a save needs a unit's newest parameters. The unit is pinned."""


class OldParametersNeeded(_UnitEvent):
    """A unit's parameters are needed in memory, without its update if one is due."""


class ParametersMade(_UnitEvent):
    """A new unit has its first values, in memory."""


class ParametersStale(_UnitEvent):
    """A unit's parameters in memory are stale: the newest are on NVMe."""


class RoomNeeded(_UnitEvent):
    """A new unit's parameters need memory that is not free."""


@dataclass(frozen=True, slots=True)
class MemoryFreed(Event):
    """Operations may have ended and released memory."""


class UpdateDue(_UnitEvent):
    """A unit's update is due. It may be submitted if the parameters are in memory."""


class UpdateExpected(_UnitEvent):
    """A unit's gradients are complete, and its update is expected. It may be submitted as a speculative update."""


class GradientsNeedRoom(_UnitEvent):
    """A unit's gradients need memory that is not free. No action follows if none can be freed."""


@dataclass(frozen=True, slots=True)
class GradientsPause(Event):
    """The gradients of a unit that may spill will not change for a while."""


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
        next_use: position of the unit's next use; negative if the plan evicts it now. The lowest is updated first.
    """

    write: bool
    next_use: int


class Submit(_Submission):
    """Submit a unit's due update. Its gradients have room."""


class SubmitSpeculative(_Submission):
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
