"""One row a unit: the state that decisions about it depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from infinity.tiers import Residency
from infinity.tiers.copies import State


class UnitState(ABC):
    """A row. State that changes during training is read from its owner, so that it exists once.

    Args:
        nbytes: of the parameters in memory.
        moves: the parameters are fetched and evicted; if False, they stay in memory.
        spills: the gradients may be written to NVMe, and share memory with other units' gradients.
    """

    __slots__ = ("index", "moves", "name", "nbytes", "spills")

    def __init__(self, index: int, name: str, nbytes: int, *, moves: bool, spills: bool) -> None:
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.moves = moves
        self.spills = spills

    def __repr__(self) -> str:
        return f"<unit {self.index} {self.name}: {self.residency.name}>"

    @property
    @abstractmethod
    def residency(self) -> Residency:
        """Whether the parameters are in memory."""

    @property
    @abstractmethod
    def is_pinned(self) -> bool:
        """Whether a use, an update or a reader keeps the parameters in memory."""

    # Gradients #

    @property
    @abstractmethod
    def gradients(self) -> State:
        """The state of the gradients' copy in host memory."""

    @property
    @abstractmethod
    def gradients_are_used(self) -> bool:
        """Whether an update reads the gradients."""

    @property
    @abstractmethod
    def gradients_have_room(self) -> bool:
        """Whether the gradients are in host memory, or there is memory to read them into."""

    # Updates #

    @property
    @abstractmethod
    def is_updated_on_device(self) -> bool:
        """Whether the optimizer states are on the device, so that updates run there."""

    @property
    @abstractmethod
    def update_is_due(self) -> bool:
        """Whether this step's update of the unit is still to be submitted."""

    @property
    @abstractmethod
    def update_has_begun(self) -> bool:
        """Whether a speculative update has done a part of the due update."""

    @property
    @abstractmethod
    def update_is_submitted(self) -> bool:
        """Whether an update of the unit is in the optimizer's queue or being written home."""

    @property
    @abstractmethod
    def is_updating(self) -> bool:
        """Whether an update is due, submitted or speculative: the copy in memory is not the newest value."""

    @property
    @abstractmethod
    def is_reconstructable(self) -> bool:
        """Whether the optimizer states can reconstruct the old parameters, if the next update is like the last one."""
