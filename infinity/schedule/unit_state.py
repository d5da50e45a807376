"""The row of a unit: the state on which decisions about it depend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from typing import Any

from infinity.tiers.copies import State


class Residency(Enum):
    """Whether a unit's parameters are in the memory that the model computes in."""

    STORED = auto()  # no
    FETCHING = auto()  # memory is allocated, the values are on their way
    RESIDENT = auto()  # yes; an update may be changing or uploading them


class UnitState(ABC):
    """A row. The states of parameters and gradients are read from their owners, so that each state is stored once.

    Args:
        nbytes: bytes of the parameters in memory.
        offloaded: whether the parameters are fetched and evicted; if False, they stay in memory.
        spills: whether the gradients may be written to NVMe. They then share memory with other units' gradients.

    Attributes:
        due: this step's update, not submitted yet.
        begun: the part of `due` that a speculative update has already done.
        ticket: the update in the optimizer's queue, or being written home.
        speculative: a speculative update. Each of these four attributes is None if there is none. The scheduler only
            compares them with None.
        is_reconstructable: whether the old parameters can be reconstructed from the optimizer states, if the next
            update is like the last one; False if no states are double-buffered.
    """

    __slots__ = (
        "begun",
        "due",
        "index",
        "is_reconstructable",
        "name",
        "nbytes",
        "offloaded",
        "speculative",
        "spills",
        "ticket",
    )

    due: Any
    begun: Any
    ticket: Any
    speculative: Any

    def __init__(self, index: int, name: str, nbytes: int, *, offloaded: bool, spills: bool) -> None:
        self.index = index
        self.name = name
        self.nbytes = nbytes
        self.offloaded = offloaded
        self.spills = spills
        self.due = self.begun = self.ticket = self.speculative = None
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
        """Whether an update is due, submitted or speculative. The parameters in memory are then not the newest."""
        return self.due is not None or self.ticket is not None or self.speculative is not None
