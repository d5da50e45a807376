"""Speculative updates: before the norm of all gradients is known, as far as they can be rolled back.

[Note: speculative updates]
If the global norm decides on an update (clipping, skipped steps), the update may run *speculatively*, before the norm
is known, as if the norm were small. It runs on the tiles of a unit whose old version stays in another slot on NVMe
(slots.py) or fits into the undo log (undo_log.py). Once the norm is known, the update is *committed*, and the
remaining tiles are updated, or it is *rolled back*. Until then the unit keeps its gradients, unless they can be
*reconstructed* from the two versions of all its states (see [Note: lost gradients] in csrc/adam/reconstruction.h): then
their memory serves other units. Parameters can be reconstructed in the same way, so parameters that stay in memory need
no slots and no write. Access to the unit's values or gradients from outside rolls the update back first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from infinity.errors import CapacityError, InfinityError
from infinity.optim.pipeline import UpdatePipeline
from infinity.optim.ticket import UpdateTicket
from infinity.telemetry import Counters
from infinity.tiers import GradStore, Memory, Params
from infinity.zero.in_flight import InFlight
from infinity.zero.unit import OldParams, SpeculativeUpdate, Unit

FreeGradients = Callable[[Unit], bool]


class Speculation:
    """The speculative updates, in the pipeline or finished.

    Attributes:
        units: as `undecided`, and cheaper to test. After an interrupt it may also contain a unit without a speculative
            update.
    """

    def __init__(
        self, params: Params, grads: GradStore, in_flight: InFlight, pipeline: UpdatePipeline, counters: Counters
    ) -> None:
        self.units: dict[Unit, None] = {}
        self._params = params
        self._critical = params.critical
        self._grads = grads
        self._in_flight = in_flight
        self._pipeline = pipeline
        self._counters = counters

    @property
    def undecided(self) -> list[Unit]:
        """Units with speculative updates, in the pipeline or finished, in order of submission."""
        return [row for row in self.units if row.speculative is not None]

    def needs_memory(self, row: Unit) -> bool:
        """Whether the unit must be in memory for a rollback, because its old parameters are reconstructed there."""
        assert row.speculative is not None
        on_drive = row.params.home is Memory.NVME
        return on_drive and row.speculative.old_params is OldParams.STATES

    def can_speculate(self, row: Unit, write: bool, next_use: int) -> bool:
        """Whether the expected update of the unit can be speculative, for at least one tile.

        The unit and its gradients must be in memory and idle. If the undo log is full, this withdraws speculative
        updates that have not started, of units that the next forward pass uses later. So the updates that remain when
        the norm is known belong to the units that are used last.
        """
        old_params = self._old_params(row, write)
        if self._reversible_tiles(row, old_params):
            return True
        later = self._used_later(next_use)
        if not self._reversible_tiles(row, old_params, without=[ticket for _, ticket in later]):
            return False
        while not (tiles := self._reversible_tiles(row, old_params)) and later:
            self._withdraw(*later.pop())
        return bool(tiles)

    def _used_later(self, next_use: int) -> list[tuple[Unit, UpdateTicket]]:
        """Return speculative updates in the undo log whose units are used after `next_use`, the latest use last."""
        found = [
            (row, row.ticket)
            for row in self.units
            if row.ticket is not None and row.speculative is not None and row.speculative.old_params is OldParams.IMAGES
        ]
        return sorted((pair for pair in found if pair[1].next_use > next_use), key=lambda pair: pair[1].next_use)

    def _withdraw(self, row: Unit, ticket: UpdateTicket) -> None:
        """Cancel a speculative update, unless the worker has already chosen it."""
        with self._critical:
            if self._pipeline.withdraw(ticket):
                self._clear(row)
                self._in_flight.finish(row)

    def _clear(self, row: Unit) -> SpeculativeUpdate:
        """Return the unit's speculative update and clear it: it is accepted, was rolled back, or never ran."""
        update = row.take_speculative()
        self.units.pop(row, None)
        return update

    def _old_params(self, row: Unit, write: bool) -> OldParams:
        """Return where the expected update would keep the unit's old parameters.

        Args:
            write: whether the update writes the parameters home in any case; the other slot is then preferred.
        """
        params, rollback, expected = row.params, self._pipeline.rollback, row.expected
        assert expected is not None
        can_roll_back, is_in_memory_alone = params.can_roll_back(), params.is_in_memory_alone()
        if can_roll_back and write:
            return OldParams.SLOTS
        is_reconstructable = is_in_memory_alone or (params.is_double_buffered and not self._params.writes_every_update)
        if (
            is_reconstructable
            and rollback.can_reconstruct_param(expected.segments, self._grads.dtype)
            and rollback.keeps_all(row.states)
        ):
            return OldParams.STATES
        if can_roll_back:
            return OldParams.SLOTS
        return OldParams.IMAGES if is_in_memory_alone else OldParams.NOWHERE

    def _reversible_tiles(
        self, row: Unit, old_params: OldParams, without: Collection[UpdateTicket] = ()
    ) -> frozenset[int]:
        """Return the indices of tiles whose update could be rolled back if the updates in `without` were withdrawn."""
        if old_params is OldParams.NOWHERE:
            return frozenset()
        return self._pipeline.reversible_tiles(row.states, param=old_params is OldParams.IMAGES, without=without)

    def speculate(self, row: Unit, write: bool, next_use: int) -> None:
        """Submit the speculative update of a unit that `can_speculate`.

        Args:
            write: see `InFlight.submit`. If it is False, the parameters may still be written, so that the old ones stay
                in the other slot.
        """
        expected = row.expected
        assert expected is not None
        segments = expected.segments
        with self._critical:
            self._in_flight.open_host(row)
            old_params = self._old_params(row, write)
            tiles = self._reversible_tiles(row, old_params)
            before = self._pipeline.rollback.keep_before(row.states, tiles, param=old_params is OldParams.IMAGES)
            reconstructs_grads = (
                expected.may_drop_grads
                and not before
                and row.spills
                and tiles == row.states.indices
                and self._pipeline.rollback.can_reconstruct(segments, self._grads.dtype)
            )
            ticket = self._in_flight.enqueue(
                row,
                segments,
                write=old_params is OldParams.SLOTS,
                next_use=next_use,
                tiles=tiles,
                before=before,
                reconstructs_grads=reconstructs_grads,
                reconstructs_param=old_params is OldParams.STATES,
            )
            self.units[row] = None
            row.speculate(SpeculativeUpdate(segments, tiles, ticket, old_params))

    def commit(self, row: Unit) -> None:
        """Commit the speculative update. If it left out tiles, their update is due now."""
        with self._critical:
            update = self._clear(row)
            if update.tiles != row.states.indices:
                row.begun = update.tiles
                self._in_flight.add_due(row, update.segments)
            elif row.ticket is not None:
                row.keeps_grads = False
            else:
                self._grads.drop(row.grads)
            self._pipeline.rollback.forget_before(update.ticket)

    def roll_back(self, rows: Sequence[Unit], free_gradients: FreeGradients, *, grads: bool = True) -> list[Unit]:
        """Roll back speculative updates: restore parameters and optimizer states.

        Args:
            free_gradients: frees memory for a unit's gradients; returns False if there is none to free.
            grads: restore the gradients, too. If False, gradients that would have to be reconstructed are dropped.

        Returns:
            Units whose parameters were restored from their slots on NVMe. Their resident copy is stale.

        Raises:
            InfinityError: a module uses one of the units.
            StorageError: the old values cannot be read.
            CapacityError: host memory has no room for the gradients.
        """
        for row in rows:
            if row.params.compute_copy.pins > int(row.ticket is not None):
                raise InfinityError(
                    f"the values of unit `{row.name}` are asked for while backward uses it, after its update has "
                    'begun: set tiering.update_schedule to "deferred"'
                )
        with self._critical:
            tickets = [row.speculative.ticket for row in rows if row.speculative is not None]
            submitted = [row for row in self._in_flight.submitted if row in rows]
            for row in submitted:
                assert row.ticket is not None
                row.ticket.drops_grads = False  # its gradients are still in memory
            self._pipeline.stop(tickets)
            for row in submitted:
                self._in_flight.finish(row)
            for row in rows:
                self._reconstruct(row, free_gradients, grads=grads, param=True)
            self._pipeline.roll_back(tickets)
            stale: list[Unit] = []
            for row in rows:
                update = row.speculative
                assert update is not None
                if update.old_params is OldParams.SLOTS:
                    self._params.roll_back(row.params)
                    stale.append(row)
                elif update.old_params is OldParams.IMAGES:
                    self._restore_from_undo_log(row, update.ticket)
                self._pipeline.rollback.forget_before(update.ticket)
                self._clear(row)
        return stale

    def _reconstruct(self, row: Unit, free_gradients: FreeGradients, *, grads: bool, param: bool) -> None:
        """Reconstruct the old values that a speculative update has not kept.

        Args:
            grads: reconstruct the gradients, if they were not kept; if False, drop them.
            param: reconstruct the parameters, if they were not kept.
        """
        stored, update = row.grads, row.speculative
        assert update is not None
        param = param and update.old_params is OldParams.STATES
        if stored.needs_reconstruction and not grads:
            self._grads.drop(stored)
        grads = stored.needs_reconstruction
        if not grads and not param:
            return
        with self._critical:
            buffer = self._room_for_grads(row, free_gradients) if grads else None
            with self._changing(row) if param else nullcontext() as flat:
                self._pipeline.reconstruct(update.ticket, grad=buffer, param=flat)
            if grads:
                self._grads.pause(stored)
                self._in_flight.gradients_may_spill = True

    def _room_for_grads(self, row: Unit, free_gradients: FreeGradients) -> torch.Tensor:
        while (buffer := self._grads.restore(row.grads)) is None:
            if not free_gradients(row):
                raise CapacityError(
                    f"no host memory is left for the gradients of unit `{row.name}`, whose update is rolled back: "
                    "raise tiering.host_memory"
                )
        assert row.speculative is not None
        # Parameters without a gradient and the padding are not reconstructed, but the norm of a shard includes them.
        end = 0
        for segment in sorted(row.speculative.ticket.segments, key=lambda each: each.start):
            buffer[end : segment.start].zero_()
            end = segment.stop
        buffer[end:].zero_()
        return buffer

    def _restore_from_undo_log(self, row: Unit, ticket: UpdateTicket) -> None:
        """Restore the parameters from the undo log."""
        with self._changing(row) as flat:
            for start, values in self._pipeline.rollback.params_before(ticket):
                flat[start : start + values.numel()].copy_(values)

    @contextmanager
    def _changing(self, row: Unit) -> Iterator[torch.Tensor]:
        """Yield this rank's shard of the parameters, in the memory in which updates change it."""
        self._in_flight.open_host(row)
        self._params.host_wait(row.params)
        for move in self._params.begin_update(row.params):
            move.wait(self._counters)
        yield row.params.shard
        self._params.close_host(row.params)

    def mark_for_rollback(self, row: Unit, free_gradients: FreeGradients) -> None:
        """Wait for a speculative update whose gradients are about to change, and mark it for rollback."""
        if row.ticket is not None:
            self._in_flight.finish(row)
        self._reconstruct(row, free_gradients, grads=True, param=False)
        assert row.speculative is not None
        row.speculative = replace(row.speculative, segments=())
