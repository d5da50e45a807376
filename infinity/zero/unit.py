"""One unit as the engine drives it: a row of the scheduler, and the state of its updates.

[Note: two updates of a unit]
This step's update may be due while the last step's is still being written home. So `due` and `ticket` are separate
lifecycles. Each transition is a method that checks the state before it:

    due:        None -> segments (ask) -> None (take_due)
    ticket:     None -> an update in the pipeline (submit) -> None (finish)
    ahead:      None -> a speculative update (run_ahead) -> None (commit, decide)

A unit with a speculative update has no update that is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

from infinity.optim.jobs import Segment, UpdateTicket
from infinity.schedule.unit_state import UnitState
from infinity.tiers import GradStore, Move, Residency, UnitGrads
from infinity.tiers.copies import State
from infinity.tiers.states import UnitStates
from infinity.tiers.unit_params import UnitParams
from infinity.zero.views import UnitViews


class OldParams(Enum):
    """Where the pre-update parameters are kept during a speculative update."""

    SLOTS = auto()  # in the other of their two slots on NVMe
    STATES = auto()  # not stored: reconstructed from the two versions of the optimizer states on NVMe
    IMAGES = auto()  # in the undo log, in host memory
    NOWHERE = auto()


@dataclass(frozen=True)
class Ahead:
    """A speculative update, submitted or finished.

    Attributes:
        segments: the whole update; only the tiles in `tiles` have had it. Empty if it must be rolled back.
    """

    segments: tuple[Segment, ...]
    tiles: frozenset[int]
    ticket: UpdateTicket
    old_params: OldParams


@dataclass(frozen=True)
class Foreseen:
    """The expected update of a unit.

    Attributes:
        grads_may_leave: the gradients are not read again unless they are asked for.
    """

    segments: tuple[Segment, ...]
    grads_may_leave: bool


class Unit(UnitState):
    """A unit.

    Attributes:
        params: its parameters.
        views: the model parameters that show them.
        grads: its gradients.
        begun: tiles that have had the update in `due` already.
        write: the move with which the update of `ticket` writes the new parameters home; None if it does not.
        keeps: the gradients of that update may be needed again, because it may be rolled back.
        foreseen: the expected update, while the scheduler decides whether it may be speculative.
    """

    __slots__ = ("_gradients", "_states", "_store", "foreseen", "grads", "keeps", "params", "views", "write")

    due: tuple[Segment, ...] | None
    begun: frozenset[int] | None
    ticket: UpdateTicket | None
    ahead: Ahead | None

    def __init__(
        self, params: UnitParams, views: UnitViews, grads: UnitGrads, store: GradStore, states: UnitStates
    ) -> None:
        spec = params.spec
        super().__init__(params.index, spec.name, spec.nbytes, moves=spec.offloaded, spills=grads.spills)
        self.params = params
        self.views = views
        self.grads = grads
        self._gradients = grads.host
        self._store = store
        self._states = states
        self.write: Move | None = None
        self.keeps = False
        self.foreseen: Foreseen | None = None

    # The row #

    @property
    def residency(self) -> Residency:
        return self.params.residency

    @property
    def is_pinned(self) -> bool:
        return self.params.computed_on.pins > 0

    @property
    def gradients(self) -> State:
        return self._gradients.state

    @property
    def gradients_are_used(self) -> bool:
        return self._gradients.pins > 0

    @property
    def gradients_have_room(self) -> bool:
        return self._store.can_hand_over(self.grads)

    @property
    def is_updated_on_device(self) -> bool:
        return self._states.are_there

    # Updates #

    def ask(self, segments: tuple[Segment, ...]) -> None:
        """Set this step's update."""
        if self.due is not None or self.ahead is not None:
            self._refuse("an update is asked for")
        self.due = segments

    def take_due(self) -> tuple[Segment, ...]:
        """Return the due update and clear it: it is submitted, or runs on the device."""
        due = self.due
        if due is None:
            self._refuse("an update is begun")
        self.due = self.begun = None
        return due

    def submit(self, ticket: UpdateTicket, write: Move | None, *, keeps: bool, reconstructable: bool) -> None:
        """Record the update in the pipeline; see the attributes."""
        if self.ticket is not None:
            self._refuse("an update is submitted")
        self.is_reconstructable = reconstructable
        self.write, self.keeps = write, keeps
        self.ticket = ticket

    def run_ahead(self, ahead: Ahead) -> None:
        """Mark the update in the pipeline as speculative."""
        if self.ahead is not None or self.due is not None:
            self._refuse("a speculative update is submitted")
        self.ahead = ahead

    def finish(self) -> tuple[UpdateTicket, Move | None]:
        """Return the update in the pipeline and its `write`, and clear both: it is over, or has failed."""
        ticket = self.ticket
        if ticket is None:
            self._refuse("an update is finished")
        write, self.write = self.write, None  # it leads to the update's memory
        self.ticket = None
        return ticket, write

    def commit(self, *, in_part: bool) -> Ahead:
        """Accept the speculative update.

        Args:
            in_part: it has updated only some tiles; the update of the others is due now.
        """
        ahead = self.decide()
        if in_part:
            self.begun = ahead.tiles
            self.ask(ahead.segments)
        return ahead

    def decide(self) -> Ahead:
        """Return the speculative update and clear it: it is accepted, was undone, or never ran."""
        ahead = self.ahead
        if ahead is None:
            self._refuse("a speculative update is decided on")
        self.ahead = None
        return ahead

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"unit `{self.name}`: {what}, but due is {self.due is not None}, submitted is "
            f"{self.ticket is not None} and speculative is {self.ahead is not None}"
        )
