"""One unit in training: a row of the scheduler, and the state of the unit's updates.

[Note: two updates of a unit]
This step's update may be due while the last step's is still being written home. So `due` and `ticket` are separate
lifecycles. Each transition is a method that checks the state before it:

    due:         None -> segments (set_due) -> None (take_due)
    ticket:      None -> an update in the pipeline (submit) -> None (finish)
    speculative: None -> a speculative update (speculate) -> None (take_speculative)

A unit with a speculative update has no update that is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NoReturn

from infinity.memory import Loan
from infinity.optim.ticket import Segment, UpdateTicket
from infinity.schedule.unit_state import Residency, UnitState
from infinity.tiers import DeviceGrads, Field, GradStore, Memory, Move, UnitGrads
from infinity.tiers.copies import State
from infinity.tiers.norms import Measures
from infinity.tiers.states import UnitStates
from infinity.tiers.unit_params import FlatSpec, UnitParams
from infinity.zero.groups import PartialSum
from infinity.zero.partition import UnitLayout
from infinity.zero.views import UnitViews

_STORED, _FETCHING, _RESIDENT = Residency  # an Enum look-up takes 0.2 us
_ARRIVING, _VALID, _WRITING = State.ARRIVING, State.VALID, State.WRITING

WHOLE = -1  # the only part of a unit whose gradients are reduced together


class OldParams(Enum):
    """Where the pre-update parameters are kept during a speculative update."""

    SLOTS = auto()  # in the other of their two slots on NVMe
    STATES = auto()  # not stored: reconstructed from the two versions of the optimizer states on NVMe
    IMAGES = auto()  # in the undo log, in host memory
    NOWHERE = auto()  # not at all, so that no update of the unit can be speculative


@dataclass(frozen=True)
class SpeculativeUpdate:
    """A speculative update, submitted or finished.

    Attributes:
        segments: the update of the whole unit. Empty if the update must be rolled back.
        tiles: the tiles that are updated now; the others are updated after the commit.
    """

    segments: tuple[Segment, ...]
    tiles: frozenset[int]
    ticket: UpdateTicket
    old_params: OldParams


@dataclass(frozen=True)
class ExpectedUpdate:
    """The expected update of a unit.

    Attributes:
        may_drop_grads: whether the memory of the gradients may be freed, because their norm is known.
    """

    segments: tuple[Segment, ...]
    may_drop_grads: bool


@dataclass(slots=True)
class StepTotal:
    """A unit's gradients of this step: which parameters have one, and the norms of the parts that were added."""

    present: set[int] = field(default_factory=set)
    stats: Measures = field(default_factory=dict)


@dataclass(slots=True)
class UnitPass:
    """A unit in the running backward pass.

    Attributes:
        in_parts: as far as this rank knows, its gradients are complete only at the end of the pass.
        waits: it must not be updated before the end of the pass. Ranks differ in this only after a `late` gradient.
        arrived: parameters whose gradient has come from autograd.
        added: parameters whose gradient of this pass, of any rank, is added to the gradients of the step.
        late: parameters whose gradient has come from autograd after the reduction of the unit had begun.
        updated: the pass has updated it, perhaps speculatively.
        uses: number of its calls in the forward, if known.
        left: number of these calls that backward has left.
    """

    in_parts: bool = False
    waits: bool = False
    arrived: set[int] = field(default_factory=set)
    added: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    updated: bool = False
    uses: int = 0
    left: int = 0

    @property
    def lacks_part(self) -> bool:
        """Whether this rank has a further gradient of a parameter whose gradients all ranks have added already."""
        return not self.late.isdisjoint(self.added)


@dataclass(slots=True)
class UnitCalls:
    """The calls of modules that compute on a unit, as hooks.py counts them in the running training passes.

    Attributes:
        followed: whether the hooks report when backward enters and leaves the unit.
        forward: number of calls in training forward passes whose backward has not ended.
        repeats: whether one of these calls ran in an autograd function, so that backward repeats it.
        constant: whether backward may read values of the unit without passing a gradient, see
            [Note: values without a gradient] in hooks.py.
        within: number of calls that the running backward pass has made: repeated calls, and calls of hooks.
        had: the parameters that have had a gradient in the running backward pass.
        gradients: number of gradients that have arrived in the running backward pass.
    """

    followed: bool = False
    forward: int = 0
    repeats: bool = False
    constant: bool = False
    within: int = 0
    had: set[int] = field(default_factory=set)
    gradients: int = 0

    @property
    def is_one(self) -> bool:
        """Whether one call, perhaps repeated, has all of the unit's gradients."""
        return self.forward == 1 and self.within == int(self.repeats)

    def end_backward(self) -> None:
        self.forward = self.within = self.gradients = 0
        self.repeats = self.constant = False
        self.had.clear()


@dataclass(slots=True)
class Collected:
    """This rank's gradients of a unit that are not reduced yet, in one flat tensor.

    Attributes:
        present: parameters with a gradient.
    """

    loan: Loan
    present: set[int] = field(default_factory=set)


@dataclass(slots=True)
class UnitTotal:
    """The gradients of a unit in the step so far. If ranks reduce them, see also reduction.py.

    Attributes:
        trained: the number of its trained parameters.
        gaps: ranges of its buffer that no addend fills.
        step: None before the step's first gradient, and from the submission of the update on.
        collected: gradients that are not reduced yet; None if there are none.
        partial: the group's sum so far, if its replicas add up once a step.
        early: whether the unit is reduced as soon as backward has left its only module, not at the end of the pass.
        flags: place of its parameters among those of all units.
    """

    trained: int
    gaps: Sequence[tuple[int, int]] = ()
    step: StepTotal | None = None
    collected: Collected | None = None
    partial: PartialSum | None = None
    early: bool = False
    flags: slice = field(default_factory=lambda: slice(0))

    @property
    def present(self) -> frozenset[int]:
        """Parameters with a gradient of this step."""
        return frozenset() if self.step is None else frozenset(self.step.present)

    @property
    def stats(self) -> Measures:
        return {} if self.step is None else self.step.stats

    def open_step(self) -> StepTotal:
        """Return `step`; at the step's first gradient, a new one."""
        if self.step is None:
            self.step = StepTotal()
        return self.step

    @property
    def pending_sum(self) -> PartialSum | None:
        """The group's sum that is not added over the replicas yet; None if there is none."""
        return self.partial if self.partial is not None and self.partial.is_pending else None

    @property
    def unreduced(self) -> set[int]:
        """Parameters with a gradient on this rank that is not reduced over all ranks yet."""
        here = set() if self.collected is None else self.collected.present
        return here if self.pending_sum is None else here | self.pending_sum.present


class Shared:
    """The unsharded state of a unit that several ranks share.

    Attributes:
        whole: the unsharded unit; its one copy has all ranks' shards.
        moving_bytes: bytes of the unsharded unit; 0 if it is never evicted.
        uses: number of modules that compute on it now.
    """

    __slots__ = ("moving_bytes", "uses", "whole")

    def __init__(self, spec: FlatSpec) -> None:
        self.moving_bytes = spec.moving_bytes
        self.uses = 0
        self.whole = Field(f"whole {spec.name}", [Memory.DEVICE])
        self.whole.invalidate()  # a value exists, but not unsharded

    @property
    def is_whole(self) -> bool:
        return self.whole.is_newest(Memory.DEVICE)


class Unit(UnitState):
    """A unit.

    Attributes:
        layout: its parameters' places.
        params: its parameters.
        views: the model parameters that show them.
        grads: the memory of its gradients.
        states: its optimizer states.
        total: its gradients so far.
        running: its part in the running backward pass; replaced when a pass begins.
        calls: its calls in the running training passes.
        shared: None if this rank has all of the unit.
        begun: tiles that already have the update in `due`.
        write: the move with which the update of `ticket` writes the new parameters home; None if it does not.
        keeps_grads: whether the gradients of that update may be needed again, because it may be rolled back.
        expected: the expected update, while the scheduler and `Speculation` decide whether it is speculative.
    """

    __slots__ = (
        "__weakref__",
        "_device_grads",
        "_gradients",
        "_store",
        "calls",
        "expected",
        "grads",
        "keeps_grads",
        "layout",
        "params",
        "running",
        "shared",
        "states",
        "total",
        "views",
        "write",
    )

    due: tuple[Segment, ...] | None
    begun: frozenset[int] | None
    ticket: UpdateTicket | None
    speculative: SpeculativeUpdate | None

    def __init__(
        self,
        layout: UnitLayout,
        params: UnitParams,
        views: UnitViews,
        grads: UnitGrads,
        store: GradStore,
        device_grads: DeviceGrads | None,
        states: UnitStates,
    ) -> None:
        spec = params.spec
        super().__init__(params.index, spec.name, spec.nbytes, offloaded=spec.offloaded, spills=grads.spills)
        self.layout = layout
        self.params = params
        self.views = views
        self.grads = grads
        self.total = UnitTotal(layout.trained)
        self.running = UnitPass()
        self.calls = UnitCalls()
        self.shared = Shared(spec) if spec.sharding.count > 1 else None
        self._gradients = grads.host
        self._store, self._device_grads = store, device_grads
        self.states = states
        self.write: Move | None = None
        self.keeps_grads = False
        self.expected: ExpectedUpdate | None = None

    # The row #

    @property
    def residency(self) -> Residency:
        params, state = self.params, self.params.compute_copy.state
        if state is _VALID or state is _WRITING or params.update_upload is not None:
            return _RESIDENT
        return _FETCHING if state is _ARRIVING else _STORED

    def can_update(self) -> bool:
        """Whether an update may begin: the unit is in the memory that updates change, or being fetched."""
        return self.params.keeps_shard or self.residency is not _STORED

    @property
    def is_pinned(self) -> bool:
        return self.params.compute_copy.pins > 0

    @property
    def gradients(self) -> State:
        return self._gradients.state

    @property
    def gradients_are_used(self) -> bool:
        return self._gradients.pins > 0

    @property
    def gradients_have_room(self) -> bool:
        return self._store.can_submit(self.grads)

    @property
    def grads_store(self) -> GradStore | DeviceGrads:
        """The memory of all units to which this step's gradients go."""
        device_grads = self._device_grads
        return device_grads if device_grads is not None and self.states.are_on_device else self._store

    @property
    def is_updated_on_device(self) -> bool:
        return self.states.are_on_device

    # Updates #

    def set_due(self, segments: tuple[Segment, ...]) -> None:
        """Set this step's update."""
        if self.due is not None or self.speculative is not None:
            self._refuse("an update is asked for")
        self.due = segments

    def take_due(self) -> tuple[Segment, ...]:
        """Return the due update and clear it: it is submitted, or runs on the device."""
        due = self.due
        if due is None:
            self._refuse("an update is begun")
        self.due = self.begun = None
        return due

    def submit(self, ticket: UpdateTicket, write: Move | None, *, keeps_grads: bool, reconstructable: bool) -> None:
        """Record the update in the pipeline; see the attributes."""
        if self.ticket is not None:
            self._refuse("an update is submitted")
        self.is_reconstructable = reconstructable
        self.write, self.keeps_grads = write, keeps_grads
        self.ticket = ticket

    def speculate(self, update: SpeculativeUpdate) -> None:
        """Mark the update in the pipeline as speculative."""
        if self.speculative is not None or self.due is not None:
            self._refuse("a speculative update is submitted")
        self.speculative = update

    def finish(self) -> tuple[UpdateTicket, Move | None]:
        """Return the update in the pipeline and its `write`, and clear both: it is over, or has failed."""
        ticket = self.ticket
        if ticket is None:
            self._refuse("an update is finished")
        write, self.write = self.write, None  # the move refers to the update's memory
        self.ticket = None
        return ticket, write

    @property
    def speculated(self) -> tuple[Segment, ...] | None:
        """The speculative update; None if there is none."""
        return None if self.speculative is None else self.speculative.segments

    def take_speculative(self) -> SpeculativeUpdate:
        """Return the speculative update and clear it: it is accepted, was rolled back, or never ran."""
        update = self.speculative
        if update is None:
            self._refuse("a speculative update is decided on")
        self.speculative = None
        return update

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"unit `{self.name}`: {what}, but due is {self.due is not None}, submitted is "
            f"{self.ticket is not None} and speculative is {self.speculative is not None}"
        )
