"""A row of the scheduler with versions instead of values. The version of a tile is the number of its updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from infinity.schedule.unit_state import Residency, UnitState
from infinity.simulation.clock import Clock, Operation
from infinity.simulation.invariants import violate
from infinity.tiers.copies import State

if TYPE_CHECKING:
    from infinity.simulation.gradients import GradMemory
    from infinity.simulation.model import UnitSpec
    from infinity.simulation.worker import Ticket
    from infinity.zero.unit import Shared

TORN, NOTHING = -1, -2  # instead of a version: it is being written or a transfer failed; there is no value
Gradient = tuple[int, int]  # its step, and how many uses have added to it


@dataclass(frozen=True)
class Due:
    """A requested update.

    Attributes:
        target, states: versions of the parameters and of the states after it.
        grad: the gradients that it applies.
        clips: whether the norm of all gradients clips it.
    """

    target: int
    states: int
    grad: Gradient
    clips: bool


@dataclass
class SpeculativeUpdate:
    """A speculative update, see [Note: speculative updates] in infinity/zero/speculation.py.

    Attributes:
        tiles: the tiles that it updates.
        old_params: where the old parameters are: "slots", "states" or "images".
    """

    due: Due
    tiles: frozenset[int]
    ticket: Ticket
    old_params: str


class Row(UnitState):
    """The scheduler's view of a unit, and the facts that performers and promises need in addition.

    Attributes:
        wanted: the newest version: the number of requested updates and of changes by users.
        updates: the number of requested updates.
        mem, home, kept: versions of the tiles in memory, at home, and in the drive's other slot, if there is one.
        protected: versions on the drive that must stay there.
        stale: memory does not have the newest version, which is on the drive.
        fetch: the operation that fills the memory.
        readers, home_readers, home_writers: number of operations that read the memory, and read and write the home.
        on_device: the optimizer states and gradients are on the device.
        writing: the last `write_home` of all changed tiles, until it was awaited.
        computing: a module computes on the unit now.
        staged, host_pins: whether it has staging memory, and how many operations need that.
        upload: the upload of its values from staging memory.
        params, shared: attributes that the engine's `Gathering` reads.
    """

    updates = 0
    residency = Residency.RESIDENT
    stale = False
    fetch: Operation | None = None
    readers = home_readers = home_writers = 0
    staged = False
    host_pins = 0
    upload: Operation | None = None
    writing: Operation | None = None
    updating_tile: int | None = None
    computing = False
    pins = 0
    due: Due | None
    begun: frozenset[int] | None
    ticket: Ticket | None
    speculative: SpeculativeUpdate | None
    params: Any = None
    shared: Shared | None = None

    def __init__(self, index: int, spec: UnitSpec, memory: GradMemory, version: int) -> None:
        super().__init__(index, f"u{index}", spec.nbytes, offloaded=spec.offloaded, spills=spec.grads == "slot")
        self.spec = spec
        self.memory = memory
        self.residency = Residency.STORED if spec.offloaded else Residency.RESIDENT
        self.wanted = version
        self.mem, self.home = [version] * spec.tiles, [version] * spec.tiles
        self.kept, self.protected = [NOTHING] * spec.tiles, [NOTHING] * spec.tiles
        self.on_device = spec.on_device

    # What the scheduler sees #

    @property
    def is_pinned(self) -> bool:
        return self.pins > 0

    @property
    def gradients(self) -> State:
        return self.memory.state(self)

    @property
    def gradients_are_used(self) -> bool:
        return self.memory.of(self).host.pins > 0

    @property
    def gradients_have_room(self) -> bool:
        return self.memory.can_submit(self)

    @property
    def is_updated_on_device(self) -> bool:
        return self.on_device

    # Home #

    @property
    def is_written_home(self) -> bool:
        """Whether a drive has a place for the values."""
        return (self.offloaded and not self.spec.host) or self.spec.is_double_buffered

    def put(self, values: list[int]) -> None:
        """Set the versions of all tiles in memory."""
        if self.residency is not Residency.STORED or not self.spec.host:
            self.mem = list(values)
        if self.spec.has_device_shard or self.spec.host:
            self.home = list(values)

    @property
    def is_dirty(self) -> bool:
        """Whether memory has newer values than the home."""
        return not self.stale and self.home != self.mem

    def write_home(self, clock: Clock, versions: dict[int, int]) -> Operation:
        """Start to write tiles with these versions to the drive."""
        beside = {tile: self.begin_write_home(tile) for tile in versions}

        def end(write: Operation) -> None:
            self.home_writers -= len(versions)
            self.readers -= len(versions)
            for tile, version in versions.items() if not write.failed else ():
                if beside[tile]:
                    self.kept[tile] = self.home[tile]
                self.home[tile] = version

        return clock.start("write", self.index, end, tuple(versions))

    def begin_write_home(self, tile: int) -> bool:
        """Mark a tile as being written to the drive. Return whether it goes to the other slot."""
        if self.home_readers:
            violate("race", f"the home of {self.name} is written while it is read")
        self.home_writers += 1
        self.readers += 1
        beside = self.home[tile] == self.protected[tile] and self.spec.is_double_buffered
        (self.kept if beside else self.home)[tile] = TORN
        return beside

    def read_home(self, clock: Clock) -> Operation:
        """Start to read the unit from its home into memory."""
        if self.home_writers:
            violate("race", f"the home of {self.name} is read while it is written")
        if any(version < 0 for version in self.home):
            violate("lost", f"the home of {self.name} has {self.home}")
        self.home_readers += 1

        def end(read: Operation) -> None:
            self.home_readers -= 1
            self.mem = self.mem if read.failed else list(self.home)

        return clock.start("copy" if self.spec.host else "fetch", self.index, end)
