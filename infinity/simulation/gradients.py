"""Gradients as a step and a count instead of values: the engine's own `GradStore` on a simulated drive and link.

Gradients of units that are updated on the device stay on it, outside of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from infinity.memory.critical_section import CriticalSection
from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.drive import Drive, Memory
from infinity.simulation.invariants import most_actions, violate
from infinity.tiers.copies import Move, State
from infinity.tiers.grads import Arrival, GradHomes, GradStore, UnitGrads
from infinity.tiers.norms import ArrivingStats

if TYPE_CHECKING:
    from infinity.simulation.model import UnitSpec
    from infinity.simulation.rows import Gradient, Row

_ABSENT, _VALID, _WRITING, _LEAVING = State.ABSENT, State.VALID, State.WRITING, State.LEAVING


class _Gradients:
    """Gradients that the device has computed."""

    nbytes = 1

    def __init__(self, value: Gradient) -> None:
        self.value = value

    def to(self, _: torch.dtype) -> _Gradients:
        return self

    def numel(self) -> int:
        return 1


class _Norms:
    """Replaces the engine's `Norms`, whose downloads also compute the norm."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def bring(self, unit: int, gradients: _Gradients, into: Memory) -> ArrivingStats:
        def end(_: Operation) -> None:
            into.value = max(into.value or (gradients.value[0], 0), gradients.value)

        return ArrivingStats(torch.empty(0), Transfer(self._clock, self._clock.start("download", unit, end)))


class GradMemory:
    """The gradients of one rank.

    Args:
        slots: number of slots for units that spill.
        shared_bytes: memory for units that have no memory of their own and do not spill.

    Attributes:
        store: the engine's store.
        questions: how often the present event has checked whether gradients have room.
    """

    def __init__(
        self, clock: Clock, units: Sequence[UnitSpec], slots: int, shared_bytes: int, critical: CriticalSection
    ) -> None:
        self.questions = 0
        self._there: dict[int, Gradient] = {}  # gradients on the device, by unit
        homes = {kind: [unit for unit, spec in enumerate(units) if spec.grads == kind] for kind in ("own", "slot")}
        sizes = [spec.grad_bytes if spec.grads else 0 for spec in units]
        arena: Any = SimpleNamespace(critical=critical, lease=_lease, try_lease=_lease, part=lambda *_, **__: arena)
        self.store = GradStore(
            sizes,
            sizes,
            torch.int8,
            arena,
            shared_bytes + sum(sizes[unit] for unit in homes["own"]),
            GradHomes(tuple(homes["own"]), tuple(homes["slot"]), slots),
            cast(Any, SimpleNamespace(moved=lambda *_, **__: None, stalled=lambda _: nullcontext())),
            cast(Any, Drive(clock, read="unspill", write="spill", units=homes["slot"])),
            cast(Any, _Norms(clock)),
        )

    def of(self, row: Row) -> UnitGrads:
        return self.store.units[row.index]

    def state(self, row: Row) -> State:
        """Return the state of the unit's gradients in the memory where they wait for the update."""
        if row.on_device:
            return _WRITING if row.index in self._there else _ABSENT
        return self.of(row).host.state

    def value(self, row: Row) -> Gradient | None:
        """Return the gradients that wait for the update; None if there are none."""
        if row.on_device:
            return self._there.get(row.index)
        tensor: Any = self.of(row).tensor
        return None if tensor is None or self.state(row) is _ABSENT else cast("Gradient | None", tensor.value)

    def check(self) -> None:
        """Check that no memory has two owners."""
        leases = [each.lease for each in self.store.leased.values()]
        if len(set(leases)) != len(leases):
            violate("owner", f"units {list(self.store.leased)} have the same memory for gradients")

    # Adding #

    def try_add(self, row: Row, step: int, count: int) -> bool:
        """Add the gradients of a use, after `count` earlier ones in this step. Return False if there is no room."""
        each, value = self.of(row), (step, count + 1)
        if row.on_device:
            self._check_added(row, (step, count))
            self._there[row.index] = value
            return True
        if row.spec.streams and self.store.can_receive(each):
            begins = each.arrival is None
            if self.store.receive(each, 0, cast(Any, _Gradients(value)), row.index) is None:
                return False
            if begins:
                cast(Any, each.tensor).value = None
            return True
        opens = each.host.state is _ABSENT
        tensor: Any = self.store.open(each)
        if tensor is None:
            return False
        if opens and not each.field.version:
            tensor.value = None
        if any(not move.transfer.done() for move in each.host.moves):
            violate("race", f"gradients of {row.name} are added to while they move")
        self._check_added(row, (step, count))
        tensor.value = value
        return True

    def _check_added(self, row: Row, before: Gradient) -> None:
        if before[1] and self.value(row) != before:
            violate("once", f"gradients of {row.name} are {self.value(row)}, and the next are added to {before}")

    def pause(self, row: Row) -> None:
        """Allow the gradients to spill, because nothing is added to them for a while."""
        if not row.on_device:
            self.store.pause(self.of(row))

    def drop(self, row: Row) -> None:
        """Drop the gradients of a unit."""
        self._there.pop(row.index, None)
        self.store.drop(self.of(row))

    # Updates #

    def can_submit(self, row: Row) -> bool:
        """Whether the gradients are in memory, or can be read into it. May free the slots of finished spills."""
        self.questions += 1
        if self.questions > 16 * most_actions(len(self.store.units)):
            violate("bounded", f"one event has checked {self.questions} times whether gradients have room")
        return self.store.can_submit(self.of(row))

    def would_have_room(self, row: Row) -> bool:
        """Return the result of `can_submit` without side effects."""
        store = self.store
        if self.of(row).extent is None or self.state(row) is not _ABSENT or len(store.leased) < len(store.slots):
            return True
        return any(map(_is_written, store.leased.values()))

    def take_for_update(self, row: Row) -> list[Operation]:
        """Pass the gradients to an update. Return the operations that it must wait for."""
        _, moves = self.store.take_for_update(self.of(row))
        return [operation for move in moves for operation in _operations(move)]

    def restore(self, row: Row, value: Gradient) -> bool:
        """Restore gradients that were reconstructed from the optimizer states. Return False if there is no room."""
        tensor: Any = self.store.restore(self.of(row))
        if tensor is None:
            return False
        tensor.value = value
        self.pause(row)
        return True

    # The scheduler's actions #

    def spill(self, row: Row) -> None:
        """Start to write the gradients to the drive."""
        each = self.of(row)
        if each.host.state not in (_VALID, _WRITING) or each.host.pins or each.lease is None:
            violate("legal", f"gradients of {row.name} should spill, and are {each.host.state.name}")
        self.store.spill(each)

    def await_spill(self, row: Row) -> None:
        """Wait until the gradients are written, and free their slot."""
        self.store.await_spill(self.of(row))
        if self.state(row) is not _ABSENT:
            violate("legal", f"gradients of {row.name} should have left memory, and are {self.state(row).name}")


def _lease(*_: object, **__: object) -> Memory:
    return Memory()


def _operations(move: Move) -> list[Operation]:
    transfers = [copy for copy, _ in move.transfer._copies] if isinstance(move.transfer, Arrival) else [move.transfer]
    return [cast(Transfer, each).operation for each in transfers]


def _is_written(each: UnitGrads) -> bool:
    ended = all(move.transfer.done() for move in each.host.moves)
    return (each.host.state is _LEAVING and ended) or each.host.state is _ABSENT
