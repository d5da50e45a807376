"""What a memory is used for: one ledger a memory, with parts that have a share of its budget each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from infinity.config import format_size, size_to_set
from infinity.errors import CapacityError

_PAGE_BYTES = 4096  # shares are rounded up to whole ones


class Part(Protocol):
    """Counts the bytes of its share."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...


@dataclass(frozen=True)
class Level:
    """How full a tier is: now, at most so far, and what it may take."""

    used_bytes: int
    peak_bytes: int
    capacity_bytes: int


class Budget:
    """Counts the bytes in use; what would exceed the capacity is refused."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """`take` would succeed."""
        return self.used_bytes + nbytes <= self.capacity_bytes

    def take(self, nbytes: int, what: str) -> None:
        """Count `nbytes` as used.

        Raises:
            CapacityError: the capacity would be exceeded.
        """
        if not self.fits(nbytes):
            raise CapacityError(
                f"{what} needs {format_size(nbytes)} of {self.name}, but {format_size(self.used_bytes)} of "
                f"{format_size(self.capacity_bytes)} are used"
            )
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        self.used_bytes -= nbytes


class Ledger:
    """All that one memory is used for.

    Attributes:
        parts: by name; together they stay within the capacity.
    """

    def __init__(self, key: str, capacity_bytes: int) -> None:
        self.key = key
        self.capacity_bytes = capacity_bytes
        self.parts: dict[str, Part] = {}

    def count(self, name: str, part: Part) -> None:
        """A part has its share from now on.

        Raises:
            CapacityError: the shares exceed the capacity.
        """
        self.parts[name] = part
        shares = self.shares_bytes
        if shares > self.capacity_bytes + _PAGE_BYTES * len(self.parts):
            told = ", ".join(f"{name} {format_size(part.capacity_bytes)}" for name, part in self.parts.items())
            raise CapacityError(
                f"{self.key} is {format_size(self.capacity_bytes)} but its parts need {format_size(shares)} ({told}): "
                f"raise it to {size_to_set(shares)} or more"
            )

    def open(self, name: str, capacity_bytes: int) -> Budget:
        """A part that counts bytes."""
        budget = Budget(f"{self.key} for {name}", capacity_bytes)
        self.count(name, budget)
        return budget

    def open_within(self, name: str, most_bytes: int) -> Budget:
        """A part of at most so many bytes, in what the others leave; none is counted where that is nothing."""
        nbytes = max(0, min(self.capacity_bytes - self.shares_bytes, most_bytes))
        return self.open(name, nbytes) if nbytes else Budget(f"{self.key} for {name}", 0)

    def fix(self, name: str, nbytes: int) -> None:
        """A part that is used as a whole."""
        if nbytes:
            self.open(name, nbytes).take(nbytes, name)

    def widen(self, name: str, part: Budget, nbytes: int) -> None:
        """A part has so much more from now on, or less; the memory is found to have it, if it was not known to."""
        part.capacity_bytes += nbytes
        self.parts[name] = part
        self.capacity_bytes = max(self.capacity_bytes, self.shares_bytes)

    @property
    def shares_bytes(self) -> int:
        """What the parts may take together."""
        return sum(part.capacity_bytes for part in self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """The most that the parts have used."""
        return sum(part.peak_bytes for part in self.parts.values())

    def level(self) -> Level:
        """How full the memory is; any thread may ask."""
        used_bytes = sum(part.used_bytes for part in tuple(self.parts.values()))
        return Level(used_bytes, self.peak_bytes, self.capacity_bytes)
