"""Gradients in a rehearsal: the memory in which they wait for their updates, and what spills for want of it
(tiers/grads.py)."""

from __future__ import annotations

from infinity.planner.lanes import Machine, Task
from infinity.planner.step_work import StepWork
from infinity.tiers.grads import spilled_ahead

READ, WRITE, DOWN, EXCHANGE = "read", "write", "down", "collectives"


class Grads:
    """Who has how much of the memory for gradients."""

    def __init__(self, work: StepWork, machine: Machine) -> None:
        self._units = work.units
        self._machine = machine
        self._free_bytes = work.grads_bytes
        self._leased_bytes = self.most_leased_bytes = 0  # beside memory of units' own, and slots
        self._free_slots = self._slots = work.spill_slots
        self._here: set[int] = set()
        self._resting: dict[int, None] = {}  # in slots, complete, oldest first
        self._leaving: dict[int, Task] = {}  # on their way to the drive, which have a slot while nobody needs it
        self._away: set[int] = set()
        self._coming: dict[int, list[Task]] = {}

    def take_room(self, unit: int) -> bool:
        """Have memory for the unit's gradients; False if there is none now."""
        work = self._units[unit]
        if unit in self._here:
            self._leaving.pop(unit, None)
            self._resting.pop(unit, None)
            return True
        if work.spill_s:
            if self._free_slots <= 0 and not self._take_written():
                return False
            self._free_slots -= 1
            if unit in self._away:
                self._coming[unit] = [self._machine.put(READ, work.spill_s, urgent=True)]
        elif work.grad_bytes > self._free_bytes:
            return False
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

    def oldest_leaving(self) -> Task | None:
        """After it there is room for one more that spills."""
        return next(iter(self._leaving.values()), None)

    def overflow(self, unit: int) -> None:
        """Take memory that is not there: the engine finds a way that takes no longer."""
        self._here.add(unit)
        self._lease(unit)
        self._free_slots -= bool(self._units[unit].spill_s)

    def come(self, unit: int) -> None:
        """All of the unit's gradients are made that a pass has: they go where they wait."""
        work, tasks = self._units[unit], self._coming.setdefault(unit, [])
        if work.reduce_s:
            tasks.append(self._machine.put(EXCHANGE, work.reduce_s))
        if work.down_s:
            tasks.append(self._machine.put(DOWN, work.down_s))

    def rest(self, unit: int) -> None:
        """Nobody needs them for a while."""
        if not self._units[unit].spill_s or unit not in self._here:
            return
        self._resting[unit] = None
        wanting = spilled_ahead(self._slots) - self._free_slots - len(self._leaving)
        for oldest in list(self._resting)[: max(0, wanting)]:
            del self._resting[oldest]
            self._leaving[oldest] = self._machine.put(WRITE, self._units[oldest].spill_s)

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
            self._resting.pop(unit, None)
            self._leaving.pop(unit, None)
            self._free_bytes += work.grad_bytes
            self._leased_bytes -= 0 if work.own_grads else work.grad_bytes
            self._free_slots += bool(work.spill_s)

    def _take_written(self) -> bool:
        """Have the slot of what was written first."""
        for unit in [unit for unit, task in self._leaving.items() if task.done][:1]:
            del self._leaving[unit]
            self._here.remove(unit)
            self._away.add(unit)
            self._free_slots += 1
        return self._free_slots > 0
