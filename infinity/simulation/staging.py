"""Staging memory of a device with a memory of its own, as in tiers/params.py.

A unit whose home is host memory needs no staging memory: its home is used instead.
"""

from __future__ import annotations

from infinity.simulation.clock import Clock
from infinity.simulation.invariants import violate
from infinity.simulation.rows import Row


class Staging:
    """The budget of staging memory. A unit keeps its part until no operation needs it and its upload has ended.

    Args:
        capacity_bytes: 0 if host and device are one memory.
    """

    def __init__(self, clock: Clock, capacity_bytes: int) -> None:
        self._clock = clock
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._leaving: dict[Row, None] = {}  # units whose part is only needed until their upload has ended

    def is_needed(self, row: Row) -> bool:
        """Whether the unit passes through host memory."""
        return self._capacity_bytes > 0 and not row.on_device

    def open(self, row: Row) -> bool:
        """Take memory for a fetch, an update or a write of the unit. Return False if other units hold all of it."""
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
        """Start to upload the values to the device."""
        if self.is_needed(row):
            row.upload = self._clock.start("upload", row.index)

    def close(self, row: Row) -> None:
        """Release the memory, once its upload has ended."""
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
            violate("ledger", f"{self._used_bytes} bytes of staging memory are used, of {self._capacity_bytes}")
