"""Gradients in a rehearsal: the memory in which they wait for their updates, and what spills for want of it
(tiers/grads.py)."""

from __future__ import annotations

from infinity.planner.lanes import Machine, Task
from infinity.planner.step_work import StepWork
from infinity.tiers.copies import State

READ, WRITE, DOWN, EXCHANGE = "read", "write", "down", "collectives"


class Grads:
    """Who has how much of the memory for gradients.

    Attributes:
        in_slots: units whose gradients have a slot, the longest first.
        leaving: those of them that are written to the drive, or have been.
    """

    def __init__(self, work: StepWork, machine: Machine) -> None:
        self._units = work.units
        self._machine = machine
        self._free_bytes = work.grads_bytes
        self._leased_bytes = self.most_leased_bytes = 0  # beside memory of units' own, and slots
        self._slots = work.spill_slots
        self.in_slots: dict[int, None] = {}
        self._here: set[int] = set()
        self._resting: set[int] = set()
        self.leaving: dict[int, Task] = {}
        self._away: set[int] = set()
        self._coming: dict[int, list[Task]] = {}

    def take_room(self, unit: int) -> bool:
        """Have memory for the unit's gradients; False if there is none now."""
        work = self._units[unit]
        if unit in self._here:
            self.leaving.pop(unit, None)
            self._resting.discard(unit)
            return True
        if not self.has_room(unit):
            return False
        if work.spill_s:
            if len(self.in_slots) >= self._slots:
                self.leave(self._written()[0])
            self.in_slots[unit] = None
            if unit in self._away:
                self._coming[unit] = [self._machine.put(READ, work.spill_s, urgent=True)]
        else:
            self._lease(unit)
        self._here.add(unit)
        return True

    def _lease(self, unit: int) -> None:
        work = self._units[unit]
        self._free_bytes -= work.grad_bytes
        if not work.own_grads:
            self._leased_bytes += work.grad_bytes
            self.most_leased_bytes = max(self.most_leased_bytes, self._leased_bytes)

    def has_room(self, unit: int) -> bool:
        """The unit's gradients have memory, or could have."""
        if unit in self._here:
            return True
        if self._units[unit].spill_s:
            return len(self.in_slots) < self._slots or bool(self._written())
        return self._units[unit].grad_bytes <= self._free_bytes

    def state(self, unit: int) -> State:
        """Of the copy in host memory."""
        if unit not in self._here:
            return State.ABSENT
        if unit in self.leaving:
            return State.LEAVING
        return State.VALID if unit in self._resting else State.WRITING

    def spill(self, unit: int) -> None:
        """Write the unit's gradients."""
        self._resting.discard(unit)
        self.leaving[unit] = self._machine.put(WRITE, self._units[unit].spill_s)

    def leave(self, unit: int) -> None:
        """The unit's gradients are written: others have their slot."""
        del self.leaving[unit], self.in_slots[unit]
        self._here.remove(unit)
        self._away.add(unit)

    def _written(self) -> list[int]:
        return [unit for unit, task in self.leaving.items() if task.done]

    def overflow(self, unit: int) -> None:
        """Take memory that is not there: the engine finds a way that takes no longer."""
        self._here.add(unit)
        self._lease(unit)
        if self._units[unit].spill_s:
            self.in_slots[unit] = None

    def come(self, unit: int) -> None:
        """All of the unit's gradients are made that a pass has: they go where they wait."""
        work, tasks = self._units[unit], self._coming.setdefault(unit, [])
        if work.reduce_s:
            tasks.append(self._machine.put(EXCHANGE, work.reduce_s))
        if work.down_s:
            tasks.append(self._machine.put(DOWN, work.down_s))

    def rest(self, unit: int) -> None:
        """Nobody needs them for a while."""
        if unit in self.in_slots:
            self._resting.add(unit)

    def hand_over(self, unit: int) -> list[Task]:
        """What an update that has room for them waits for."""
        return self._coming.pop(unit, [])

    def coming(self) -> list[Task]:
        """All that are on their way."""
        return [task for tasks in self._coming.values() for task in tasks]

    def used(self, unit: int) -> None:
        """They are nothing any more."""
        work = self._units[unit]
        self._away.discard(unit)
        if unit in self._here:
            self._here.remove(unit)
            self._resting.discard(unit)
            self.leaving.pop(unit, None)
            self.in_slots.pop(unit, None)
            self._free_bytes += work.grad_bytes
            self._leased_bytes -= 0 if work.own_grads else work.grad_bytes
