"""Host memory that units pass through, where the device has a memory of its own; what tiers/params.py does.

A unit whose home is host memory passes through that, and takes nothing of the budget.
"""

from __future__ import annotations

from infinity.simulation.clock import Clock
from infinity.simulation.invariants import violate
from infinity.simulation.rows import Row


class Staging:
    """A budget of bytes; a unit keeps its part until nobody needs it and its upload is over.

    Args:
        capacity_bytes: 0 where host and device are one memory.
    """

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._leaving: dict[Row, None] = {}  # nobody needs their parts, which are still being read

    def is_needed(self, row: Row) -> bool:
        """The unit passes through host memory."""
        return self._capacity_bytes > 0 and not row.on_device

    def open(self, row: Row) -> bool:
        """Have memory for the unit's values, for a fetch, an update or a write; False if others hold it all."""
        if not self.is_needed(row):
            return True
        if row in self._leaving:
            self._finish(row)
        for other in [each for each in self._leaving if each.upload is None or each.upload.done]:
            self._finish(other)
        if not row.staged:
            nbytes = self._bytes(row)
            while self._used_bytes + nbytes > self._capacity_bytes and self._leaving:
                self._finish(next(iter(self._leaving)))
            if self._used_bytes + nbytes > self._capacity_bytes:
                return False
            self._used_bytes += nbytes
            row.staged = True
        row.host_pins += 1
        return True

    def upload(self, row: Row) -> None:
        """The values go to the device, behind what it does now."""
        if self.is_needed(row):
            row.upload = self._clock.start("upload", row.index)

    def close(self, row: Row) -> None:
        """The values may leave host memory."""
        if self.is_needed(row):
            row.host_pins -= 1
            if not row.host_pins:
                self._leaving[row] = None

    def _finish(self, row: Row) -> None:
        if row.upload is not None:
            self._clock.wait(row.upload)
        del self._leaving[row]
        row.upload, row.staged = None, False
        self._used_bytes -= self._bytes(row)

    @staticmethod
    def _bytes(row: Row) -> int:
        return 0 if row.spec.host else row.nbytes

    def check(self) -> None:
        if self._used_bytes > self._capacity_bytes:
            violate("ledger", f"{self._used_bytes} bytes on the way are used, of {self._capacity_bytes}")
