"""One row a unit: all that decisions about it depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from infinity.tiers import Residency
from infinity.tiers.copies import State


class UnitState(ABC):
    """A row. What changes during training is read where it is kept, so that there is one truth of it.

    Args:
        nbytes: of the parameters in memory.
        moves: they come and go; else they stay in memory.
        spills: gradients may be written to the drive, and shares memory with others that may.
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
        """Somebody, an update perhaps, keeps the parameters in memory."""

    # Gradients #

    @property
    @abstractmethod
    def gradients(self) -> State:
        """Of the gradients' copy in host memory."""

    @property
    @abstractmethod
    def gradients_are_used(self) -> bool:
        """An update has the gradients."""

    @property
    @abstractmethod
    def gradients_have_room(self) -> bool:
        """The gradients are in host memory, or there is memory to read them into."""

    # Updates #

    @property
    @abstractmethod
    def is_updated_on_device(self) -> bool:
        """The optimizer states are on the device, and the next update is carried out there."""

    @property
    @abstractmethod
    def update_is_due(self) -> bool:
        """This step has an update for the unit that is not submitted yet."""

    @property
    @abstractmethod
    def update_has_begun(self) -> bool:
        """A speculative update has done a part of the update that is due."""

    @property
    @abstractmethod
    def update_is_submitted(self) -> bool:
        """An update of the unit is in the optimizer's queue, or on its way home."""

    @property
    @abstractmethod
    def is_updating(self) -> bool:
        """An update is due, submitted, or speculative: what is in memory is not the unit's newest value."""

    @property
    @abstractmethod
    def is_reconstructable(self) -> bool:
        """The old parameters can be reconstructed from the optimizer state, if the next update is like the last one."""
