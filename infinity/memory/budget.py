"""The ledger of one tier's budget."""

from __future__ import annotations

from infinity.errors import CapacityError


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
                f"{what} needs {nbytes} bytes of {self.name}, but {self.used_bytes} of {self.capacity_bytes} are used"
            )
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as free again."""
        self.used_bytes -= nbytes
