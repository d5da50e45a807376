"""One row a unit: the state that decisions about it depend on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from infinity.tiers import Residency
from infinity.tiers.copies import State


class UnitState(ABC):
    """A row. The states of parameters and gradients are read from their owners, so that they exist once.

    Args:
        nbytes: of the parameters in memory.
        offloaded: the parameters are fetched and evicted; if False, they stay in memory.
        spills: the gradients may be written to NVMe, and share memory with other units' gradients.

    Attributes:
        due: this step's update, not submitted yet.
        begun: the part of it that a speculative update has done already.
        ticket: the update in the optimizer's queue, or being written home.
        ahead: a speculative update. Each of these four is None if there is none, and the scheduler only
            compares it with None.
        is_reconstructable: the optimizer states can reconstruct the old parameters, if the next update is like the
            last one.
    """

    __slots__ = (
        "ahead",
        "begun",
        "due",
        "index",
        "is_reconstructable",
        "name",
        "nbytes",
        "offloaded",
        "spills",
        "ticket",
    )

    due: Any
    begun: Any
    ticket: Any
    ahead: Any

    def __init__(self, index: int, name: str, nbytes: int, *, offloaded: bool, spills: bool) -> None:
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.offloaded = offloaded
        self.spills = spills
        self.due = self.begun = self.ticket = self.ahead = None
        self.is_reconstructable = False

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
    def is_updating(self) -> bool:
        """Whether an update is due, submitted or speculative: the copy in memory is not the newest value."""
        return self.due is not None or self.ticket is not None or self.ahead is not None
