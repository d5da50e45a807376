"""Memory for gradients, with a step and a count in the place of values; what tiers/grads.py does with bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinity.simulation.clock import Clock, Operation
from infinity.simulation.invariants import most_actions, violate
from infinity.simulation.rows import Row
from infinity.tiers.copies import State
from infinity.tiers.grads import ARRIVING_UNITS

_ABSENT, _ARRIVING, _VALID, _WRITING, _LEAVING = State.ABSENT, State.ARRIVING, State.VALID, State.WRITING, State.LEAVING


class GradMemory:
    """Slots that spilling units share, and bytes that units lease.

    Args:
        slots: for units that spill.
        shared_bytes: for those that have no memory of their own and do not spill.

    Attributes:
        leased: units that lease memory or have a slot, the longest first; the scheduler reads it.
    """

    def __init__(self, clock: Clock, slots: int, shared_bytes: int) -> None:
        self.leased: dict[int, None] = {}
        self.slots = slots
        self.rows: Sequence[Row] = ()
        self._arriving: dict[Row, None] = {}  # units whose gradients come from the device, the oldest first
        self.questions = 0  # of the event that is performed
        self._clock = clock
        self._shared_bytes = shared_bytes
        self._leased_bytes = 0
        self._moving: list[list[Operation]] = [[] for _ in range(slots)]  # operations on each slot's bytes

    def check(self) -> None:
        """No slot has two owners, and no more is leased than there is."""
        owners = [self.rows[unit].slot for unit in self.leased if self.rows[unit].spills]
        if len(set(owners)) != len(owners) or len(owners) > self.slots:
            violate("owner", f"slots {owners} are taken")
        if self._leased_bytes > self._shared_bytes:
            violate("ledger", f"{self._leased_bytes} bytes of gradients are leased, of {self._shared_bytes}")

    # Adding #

    def open(self, row: Row) -> bool:
        """Have the gradients in memory to be added to; False while there is no room."""
        if row.gradients is not _WRITING:
            if row.grad_pins or not self._bring(row):
                return False
            if row.spills or row.streams_in is not None:
                self.finish_moves(row)
            row.gradients = _WRITING
        return True

    def try_add(self, row: Row, step: int, count: int) -> bool:
        """A use adds to the gradients; so many have done so before in this step. False while there is no room."""
        if row.spec.streams and not row.on_device and self._can_receive(row):
            return self._receive(row, step, count)
        if not self.open(row):
            return False
        if any(not move.done for move in row.grad_moves):
            violate("race", f"gradients of {row.name} are added to while they move")
        if count and row.grad_host != (step, count):
            violate("once", f"the {count + 1}th gradients of {row.name} are added to {row.grad_host} of step {step}")
        row.grad_host = (step, count + 1)
        return True

    @staticmethod
    def _can_receive(row: Row) -> bool:
        """All that the unit has in this step comes from the device, and no update has what it had before."""
        exists = row.gradients is not _ABSENT or row.grad_drive is not None
        return not row.grad_pins and (row.streams_in is not None or not exists)

    def _receive(self, row: Row, step: int, count: int) -> bool:
        """Gradients leave the device while it computes on, see [Note: gradients that stream] in tiers/grads.py."""
        if row.streams_in is None:
            self._finish_arrivals(ARRIVING_UNITS - 1)
            if not self._bring(row):
                return False
            row.gradients, row.streams_in = _ARRIVING, True
            self._arriving[row] = None

        def end(_: Operation) -> None:
            row.grad_host = max(row.grad_host or (step, 0), (step, count + 1))

        self._move(row, "download", end)
        return True

    def _finish_arrivals(self, most: int) -> None:
        """Have no more whole units than this on their way, whose memory the device keeps."""
        closed = [row for row in self._arriving if row.streams_in is False]
        for left, row in zip(range(len(closed), 0, -1), closed, strict=True):
            if left <= most and not all(move.done for move in row.grad_moves):
                break
            self.finish_moves(row)

    def rest(self, row: Row) -> None:
        """Nothing is added for a while: what spills may spill."""
        if row.streams_in is not None:
            row.streams_in = False
            self._finish_arrivals(ARRIVING_UNITS)
        if row.spills and not row.on_device and row.gradients is _WRITING:
            row.gradients = _VALID
            row.grad_drive = None

    def drop(self, row: Row) -> None:
        """The gradients are nothing any more."""
        row.elsewhere = False
        self.finish_moves(row)
        row.gradients, row.grad_host, row.grad_drive = _ABSENT, None, None
        self._give_back(row)

    # Updates #

    def can_hand_over(self, row: Row) -> bool:
        """There is room for the gradients, if they are elsewhere."""
        self.questions += 1
        if self.questions > 16 * most_actions(len(self.rows)):
            violate("bounded", f"one event has asked {self.questions} times whether gradients have room")
        return not row.spills or row.gradients is not _ABSENT or self._has_free_slot()

    def would_have_room(self, row: Row) -> bool:
        """As `can_hand_over`, changing nothing."""
        return (
            not row.spills
            or row.gradients is not _ABSENT
            or len(self.leased) < self.slots
            or any(self._is_written(self.rows[unit]) for unit in self.leased)
        )

    def hand_over(self, row: Row) -> list[Operation]:
        """The gradients are an update's, once these operations are over."""
        if row.gradients is _WRITING:
            row.gradients, row.grad_drive = _VALID, None
        if row.streams_in:
            row.streams_in = False
        if not self._bring(row):
            violate("legal", f"an update of {row.name} is submitted, and its gradients have no room")
        row.grad_pins += 1
        return list(row.grad_moves)

    def used(self, row: Row) -> None:
        """The update has used the gradients."""
        row.grad_pins -= 1
        self.drop(row)

    def returned(self, row: Row) -> None:
        """The update does not use the gradients any more, and they may be of use again."""
        row.grad_pins -= 1
        self.rest(row)

    # The scheduler's actions #

    def spill(self, row: Row) -> None:
        """Start to write the gradients to the drive."""
        if row.gradients is _WRITING:
            row.gradients, row.grad_drive = _VALID, None
        if row.gradients is not _VALID or row.grad_pins or row.slot is None:
            violate("legal", f"gradients of {row.name} are to spill, and are {row.gradients.name}")
        if row.grad_drive is None and not row.grad_moves:
            self._move(row, "spill", lambda move: self._end_spill(row, move))
        row.gradients = _LEAVING if row.grad_moves else _ABSENT  # as long as nobody has noted that they are over

    @staticmethod
    def _end_spill(row: Row, move: Operation) -> None:
        if not move.failed:
            row.grad_drive = row.grad_host

    def await_spill(self, row: Row) -> None:
        """Wait until the gradients are written, and give their slot back."""
        self.finish_moves(row)
        if row.gradients is not _ABSENT:
            violate("legal", f"gradients of {row.name} are to have left, and are {row.gradients.name}")
        self._give_back(row)

    def finish_moves(self, row: Row) -> None:
        """Wait for what moves of the gradients."""
        for move in row.grad_moves:
            self._clock.wait(move)
        moves, row.grad_moves, row.streams_in = row.grad_moves, [], None
        self._arriving.pop(row, None)
        if row.gradients is _ARRIVING:
            row.gradients = _VALID
        if row.gradients is _LEAVING:
            row.gradients = _ABSENT
        for move in moves:
            move.check()

    # Memory #

    def _bring(self, row: Row) -> bool:
        """Have the gradients in memory, or on their way there; False while there is no room."""
        if row.gradients is _LEAVING:
            row.gradients = _VALID
        elsewhere = not row.on_device and row.spec.grads != "own"
        if row.gradients is _ABSENT and elsewhere and row.index not in self.leased:
            if row.spills:
                if not self._has_free_slot():
                    return False
                taken = {self.rows[unit].slot for unit in self.leased}
                row.slot = next(slot for slot in range(self.slots) if slot not in taken)
                if any(not move.done for move in self._moving[row.slot]):
                    violate("owner", f"slot {row.slot} is given to {row.name} while something moves there")
                self._moving[row.slot] = []
            elif self._leased_bytes + row.spec.grad_bytes > self._shared_bytes:
                return False
            else:
                self._leased_bytes += row.spec.grad_bytes
            self.leased[row.index] = None
            row.grad_host = None
        if row.gradients is _ABSENT and row.grad_drive is not None:
            row.gradients = _ARRIVING
            self._move(row, "unspill", lambda move: self._end_unspill(row, move))
        return True

    @staticmethod
    def _end_unspill(row: Row, move: Operation) -> None:
        if not move.failed:
            row.grad_host = row.grad_drive

    def _has_free_slot(self) -> bool:
        """A slot is free, or that of gradients that are written, which may be of use where they are until then."""
        if len(self.leased) == self.slots:
            for unit in self.leased:
                if self._is_written(self.rows[unit]):
                    self.await_spill(self.rows[unit])
                    break
        return len(self.leased) < self.slots

    @staticmethod
    def _is_written(row: Row) -> bool:
        done = all(move.done for move in row.grad_moves)
        return (row.gradients is _LEAVING and done) or row.gradients is _ABSENT

    def _give_back(self, row: Row) -> None:
        if row.index in self.leased:
            del self.leased[row.index]
            row.slot = None
            if not row.spills:
                self._leased_bytes -= row.spec.grad_bytes

    def _move(self, row: Row, kind: str, end: Callable[[Operation], None]) -> None:
        move = self._clock.start(kind, row.index)
        move.end = lambda: end(move)
        row.grad_moves.append(move)
        if row.slot is not None:
            self._moving[row.slot].append(move)
