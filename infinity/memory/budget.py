"""The use of a memory: one ledger for each memory, and in it a share of the budget for each part."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.config import format_size, size_to_set
from infinity.errors import CapacityError
from infinity.memory.arena import ALIGN_BYTES, Arena


@dataclass(frozen=True)
class Level:
    """How full a tier is: bytes used now, at most so far, and its capacity."""

    used_bytes: int
    peak_bytes: int
    capacity_bytes: int


class Budget:
    """Counts bytes in use, and refuses to exceed its capacity."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def fits(self, nbytes: int) -> bool:
        """Whether `take` would succeed."""
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
    """All uses of one memory.

    Attributes:
        parts: the parts by name. Together they stay within the capacity.
    """

    def __init__(self, key: str, capacity_bytes: int) -> None:
        self.key = key
        self.capacity_bytes = capacity_bytes
        self.parts: dict[str, Arena | Budget] = {}

    def count(self, name: str, part: Arena | Budget) -> None:
        """Add a part with its share.

        Raises:
            CapacityError: the shares exceed the capacity.
        """
        self.parts[name] = part
        shares = self.shares_bytes
        if shares > self.capacity_bytes + ALIGN_BYTES * len(self.parts):  # shares are rounded up
            each = ", ".join(f"{name} {format_size(part.capacity_bytes)}" for name, part in self.parts.items())
            raise CapacityError(
                f"{self.key} is {format_size(self.capacity_bytes)} but its parts need {format_size(shares)} ({each}): "
                f"raise it to {size_to_set(shares)} or more"
            )

    def open(self, name: str, capacity_bytes: int) -> Budget:
        """Add a part that counts bytes."""
        budget = Budget(f"{self.key} for {name}", capacity_bytes)
        self.count(name, budget)
        return budget

    def open_within(self, name: str, most_bytes: int) -> Budget:
        """Add a part of at most `most_bytes`. Without free capacity, add none and return an empty budget."""
        nbytes = max(0, min(self.capacity_bytes - self.shares_bytes, most_bytes))
        return self.open(name, nbytes) if nbytes else Budget(f"{self.key} for {name}", 0)

    def fix(self, name: str, nbytes: int) -> None:
        """Add a part that is used as a whole."""
        if nbytes:
            self.open(name, nbytes).take(nbytes, name)

    def widen(self, name: str, part: Budget, nbytes: int) -> None:
        """Change a part's share by `nbytes`, which may be negative. Raise the ledger's capacity if needed."""
        part.capacity_bytes += nbytes
        self.parts[name] = part
        self.capacity_bytes = max(self.capacity_bytes, self.shares_bytes)

    @property
    def shares_bytes(self) -> int:
        """Sum of the parts' shares."""
        return sum(part.capacity_bytes for part in self.parts.values())

    @property
    def peak_bytes(self) -> int:
        """Sum of the parts' peaks."""
        return sum(part.peak_bytes for part in self.parts.values())

    def level(self) -> Level:
        """Return how full the memory is. Thread-safe."""
        used_bytes = sum(part.used_bytes for part in tuple(self.parts.values()))
        return Level(used_bytes, self.peak_bytes, self.capacity_bytes)
