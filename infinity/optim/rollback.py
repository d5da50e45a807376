"""Rollback of updates: old values are kept in the undo log, or reconstructed from the states.

The old version of a tile on NVMe is in the other slot (tiers/slots.py). A tile in memory has a second place
(undo_log.py). The gradients and parameters of a tile on NVMe can be reconstructed from both versions of its states, see
[Note: lost gradients] in csrc/adam/reconstruction.h, except a few elements, which are kept (`Remainder`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

import torch

from infinity.kernels import Lost, Rule
from infinity.optim.formats import TileFields, can_reconstruct, can_reconstruct_param, reconstruct
from infinity.optim.ticket import Segment, UpdateTicket, parts_of
from infinity.optim.undo_log import Image, Room, UndoLog, image_bytes
from infinity.tiers.copies import Memory
from infinity.tiers.ring import Ring
from infinity.tiers.state_layout import StateLayout
from infinity.tiers.states import StateStore, Tile, UnitStates

_MOST_LOST_PARAMS = 1 << 20  # each takes 10 bytes, which no budget accounts for
_RECONSTRUCTION_SLOTS = 2  # one for the tile after its update, one for the tile before it
_HOST = Memory.HOST  # a look-up in an Enum takes 0.2 us


class Rollback:
    """Keeps the old values of updates, and restores them.

    Attributes:
        log: the memory of the undo log; closed with the pipeline.

    Args:
        ring: the worker's ring. A few of its slots are free between two tiles.
        slots: number of slots of the ring.
    """

    def __init__(
        self,
        layout: StateLayout,
        store: StateStore,
        fields: TileFields,
        ring: Ring,
        slots: int,
        log: UndoLog,
    ) -> None:
        self._layout = layout
        self._store = store
        self._fields = fields
        self._ring = ring
        self._has_slots = slots >= _RECONSTRUCTION_SLOTS
        self.log = log
        self._lost_params = 0  # elements that are kept for updates that may be rolled back
        self._lock = threading.Lock()  # the worker adds values, the compute thread removes them

    # Called by the compute thread, before and after the update #

    def keeps_all(self, states: UnitStates) -> bool:
        """Whether an update that is submitted now would keep all old states of the unit in other slots."""
        return all(map(self._store.can_roll_back, states.tiles))

    def reversible_tiles(
        self, states: UnitStates, *, param: bool, without: Collection[UpdateTicket] = ()
    ) -> frozenset[int]:
        """Return the indices of the unit's tiles that could be rolled back after an update that is submitted now.

        If parameters are kept, return all tiles or none: a unit is uploaded as a whole, and would be uploaded twice.

        Args:
            param: whether the undo log must keep the unit's parameters, too.
            without: updates that have not started; the answer is for the case that they are withdrawn.
        """
        with self._lock:
            room = self.log.room(image for ticket in without for image in ticket.before.values())
            reversible = frozenset(tile.index for tile in states.tiles if self._is_reversible(tile, room, param=param))
        return reversible if not param or reversible == states.indices else frozenset()

    def _is_reversible(self, tile: Tile, room: Room, *, param: bool) -> bool:
        image = self._image(tile, param=param)
        return (tile.is_in_memory_alone or not image.fields_bytes) and room.draw(image.sizes)

    def _image(self, tile: Tile, *, param: bool) -> Image:
        """Return the part of the undo log for an update of the tile that is submitted now."""
        param_bytes = image_bytes(self._layout, tile.numel) - tile.nbytes
        return Image(0 if self._store.can_roll_back(tile) else tile.nbytes, param_bytes if param else 0)

    def can_reconstruct(self, segments: Sequence[Segment], grad_dtype: torch.dtype) -> bool:
        """Whether a rollback can reconstruct gradients of this dtype, so that they need not be kept."""
        return self._has_slots and all(can_reconstruct(self._layout, each.rule, grad_dtype) for each in segments)

    def can_reconstruct_param(self, segments: Sequence[Segment], grad_dtype: torch.dtype) -> bool:
        """Whether a rollback can also reconstruct parameters, and few enough elements are kept so far."""
        few = self._lost_params < _MOST_LOST_PARAMS
        return few and can_reconstruct_param(self._layout) and self.can_reconstruct(segments, grad_dtype)

    def keep_before(self, states: UnitStates, tiles: Collection[int], *, param: bool) -> dict[int, Image]:
        """Reserve memory of the undo log for an update of `tiles`, and return the images by tile.

        Tiles that need no image are omitted. `tiles` is a result of `reversible_tiles`. Pairs with `forget_before`.
        """
        updated = [tile for tile in states.tiles if tile.index in tiles]
        images = {tile.index: image for tile in updated if (image := self._image(tile, param=param)).sizes}
        with self._lock:
            for image in images.values():
                self.log.promise(image)
        return images

    def forget_before(self, ticket: UpdateTicket) -> None:
        """Free the old values of the update."""
        with self._lock:
            ticket.keeps = False
            self._lost_params -= ticket.remainder.forget_params()
            for index, image in ticket.before.items():
                if ticket.under_way is None or ticket.under_way.index != index:  # the worker frees the tile under way
                    self.log.give_back(image)

    @staticmethod
    def params_before(ticket: UpdateTicket) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the start and the old values of each piece of a shard's parameters that an update has changed."""
        for tile in ticket.kept:
            before = ticket.before[tile.index].old_param(ticket.param.dtype, tile.numel)
            for start, stop, _ in parts_of(ticket, tile):
                if before is not None:
                    yield start, before[start - tile.start : stop - tile.start]

    # Called by the worker, around the update of a tile #

    def begin_keeping(self, ticket: UpdateTicket, tile: Tile) -> Image | None:
        """Return the image for the old values of a tile; None if they are not needed."""
        if not ticket.before:
            return None
        with self._lock:
            image = ticket.before.get(tile.index) if ticket.keeps else None
            if image is not None:
                self.log.take(image)
                ticket.under_way = tile
        return image

    def end_keeping(self, ticket: UpdateTicket, tile: Tile, image: Image) -> None:
        """Exchange the tile's two places, after its new fields were written to the second one."""
        if image.fields is not None:
            tile.lease, image.fields = image.fields, tile.lease
        with self._lock:
            ticket.under_way = None
            if ticket.keeps:
                ticket.kept.append(tile)
            else:
                self.log.give_back(image)

    def note_lost(self, ticket: UpdateTicket, start: int, lost: Lost) -> None:
        """Keep the elements that cannot be reconstructed from the states. Their positions count from `start`."""
        remainder = ticket.remainder
        if lost.grads is None:
            ticket.drops_grads = False
            remainder.forget_grads()
        elif ticket.drops_grads:
            remainder.keep_grads(lost.grads, start, ticket.grad)
        with self._lock:
            if ticket.keeps:
                remainder.keep_params(lost.params, start, lost.param_bits, ticket.param.dtype)
                self._lost_params += len(lost.params)

    # Called by the worker, between two tiles #

    def roll_back(self, ticket: UpdateTicket, tile: Tile) -> None:
        """Restore the states of a tile, if the update has reached it."""
        image = ticket.before.get(tile.index)
        if image is None or not image.fields_bytes:
            self._ring.roll_back(tile)
        elif tile in ticket.kept:
            tile.lease, image.fields = image.fields, tile.lease
            tile.roll_back(_HOST)

    def reconstruct(
        self, ticket: UpdateTicket, tiles: Sequence[Tile], grad: torch.Tensor | None, param: torch.Tensor | None
    ) -> None:
        """Reconstruct the old values of the updated tiles; the tensors cover the whole shard."""
        for tile in tiles:
            parts = list(parts_of(ticket, tile))
            if parts:
                self._reconstruct_tile(tile, parts, grad, param)
        ticket.remainder.put(grad, param)

    def _reconstruct_tile(
        self,
        tile: Tile,
        parts: Sequence[tuple[int, int, Rule]],
        grad: torch.Tensor | None,
        param: torch.Tensor | None,
    ) -> None:
        self._ring.hold(tile)
        try:
            with self._ring.before(tile) as place:
                before, after = self._fields.at(place, tile), self._fields.of(tile)
                for start, stop, rule in parts:
                    old, new = (self._fields.part(fields, tile, start, stop) for fields in (before, after))
                    old_grad = None if grad is None else grad[start:stop]
                    old_param = None if param is None else param[start:stop]
                    reconstruct(self._layout, rule, old, new, grad=old_grad, param=old_param)
        finally:
            self._ring.release(tile)
