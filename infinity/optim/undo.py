"""What there was before updates that may be undone: kept where an update replaces it, or told by the states.

A tile on the drives has its old version in another slot (tiers/slots.py), one in memory a second place
(before_images.py). Both versions of its states together tell its gradients and parameters, see [Note: lost gradients]
in csrc/adam/recovery.h, but for a few, which are kept (remainder.py).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

import torch

from infinity.kernels import Lost, Rule
from infinity.optim.before_images import BeforeImages, Image, Room, image_bytes
from infinity.optim.formats import StateLayout, can_recover, can_recover_param, recover
from infinity.optim.jobs import Segment, UpdateTicket, parts_of
from infinity.optim.tile_fields import TileFields
from infinity.tiers.copies import Memory
from infinity.tiers.ring import Ring
from infinity.tiers.states import StateStore, Tile

_MOST_LOST_PARAMS = 1 << 20  # each takes 10 bytes, for which no budget has room
_RECOVERING_SLOTS = 2  # one has a tile after its update, one as it was before
_HOST = Memory.HOST  # a look-up in an Enum takes 0.2 us


class Undo:
    """Keeps what updates replace, and puts it back.

    Attributes:
        images: room for what they replace in memory; closed with the pipeline.

    Args:
        ring: of the worker; between its tiles a few slots are free.
        slots: how many the ring has.
    """

    def __init__(
        self,
        layout: StateLayout,
        states: StateStore,
        fields: TileFields,
        ring: Ring,
        slots: int,
        images: BeforeImages,
    ) -> None:
        self._layout = layout
        self._states = states
        self._fields = fields
        self._ring = ring
        self._recovers = slots >= _RECOVERING_SLOTS
        self.images = images
        self._lost_params = 0  # of updates that may be undone
        self._lock = threading.Lock()  # the worker keeps what the compute thread forgets

    # Called from the compute thread, before and after the update #

    def has_slots(self, unit: int) -> bool:
        """What an update that is submitted now replaces of the unit's states stays in other slots."""
        return all(map(self._states.can_undo, self._states.tiles(unit)))

    def can_undo(self, unit: int, *, param: bool, without: Collection[UpdateTicket] = ()) -> frozenset[int]:
        """Indices of the unit's tiles of which an update that is submitted now can be undone.

        All or none where parameters are in memory: what goes up to a device goes as a unit, and would go twice.

        Args:
            param: its parameters are to be kept, too.
            without: updates that have not begun, and would be withdrawn.
        """
        tiles = self._states.tiles(unit)
        with self._lock:
            room = self.images.room(image for ticket in without for image in ticket.job.before.values())
            undoable = frozenset(tile.index for tile in tiles if self._can_undo(tile, room, param=param))
        return undoable if not param or len(undoable) == len(tiles) else frozenset()

    def _can_undo(self, tile: Tile, room: Room, *, param: bool) -> bool:
        fields = not self._states.can_undo(tile)
        if fields and not tile.is_in_memory_alone:
            return False
        return room.draw([*([tile.nbytes] if fields else []), *([self._param_bytes(tile)] if param else [])])

    def _param_bytes(self, tile: Tile) -> int:
        return image_bytes(self._layout, tile.numel) - tile.nbytes

    def can_recover(self, segments: Sequence[Segment], grad_dtype: torch.dtype) -> bool:
        """Gradients of this dtype need not be kept for when updates by these rules are undone."""
        return self._recovers and all(can_recover(self._layout, each.rule, grad_dtype) for each in segments)

    def can_recover_param(self, segments: Sequence[Segment], grad_dtype: torch.dtype) -> bool:
        """Nor need parameters, but for those that are lost, of which there are not many."""
        few = self._lost_params < _MOST_LOST_PARAMS
        return few and can_recover_param(self._layout) and self.can_recover(segments, grad_dtype)

    def keep_before(self, unit: int, tiles: Collection[int], *, param: bool) -> dict[int, Image]:
        """Room for what an update of these tiles replaces, which `can_undo` has named; of those that need any.

        Pairs with `forget_before`.
        """
        images = {}
        for tile in self._states.tiles(unit):
            fields = not self._states.can_undo(tile)
            if tile.index in tiles and (param or fields):
                images[tile.index] = Image(tile.nbytes if fields else 0, self._param_bytes(tile) if param else 0)
        with self._lock:
            for image in images.values():
                self.images.promise(image)
        return images

    def forget_before(self, ticket: UpdateTicket) -> None:
        """What the update has replaced is not needed any more."""
        with self._lock:
            ticket.keeps = False
            self._lost_params -= ticket.remainder.forget_params()
            for index, image in ticket.job.before.items():
                if ticket.under_way is None or ticket.under_way.index != index:  # the worker gives that back
                    self.images.give_back(image)

    @staticmethod
    def params_before(ticket: UpdateTicket) -> Iterator[tuple[int, torch.Tensor]]:
        """Where pieces of a shard's parameters begin that an update has changed, and what they were."""
        for tile in ticket.kept:
            before = ticket.job.before[tile.index].old_param(ticket.job.param.dtype, tile.numel)
            for start, stop, _ in parts_of(ticket.job, tile):
                if before is not None:
                    yield start, before[start - tile.start : stop - tile.start]

    # Called from the worker, around the update of a tile #

    def begin_keeping(self, ticket: UpdateTicket, tile: Tile) -> Image | None:
        """Where what the update of a tile replaces goes; None where it is not needed again."""
        if not ticket.job.before:
            return None
        with self._lock:
            image = ticket.job.before.get(tile.index) if ticket.keeps else None
            if image is not None:
                self.images.take(image)
                ticket.under_way = tile
        return image

    def end_keeping(self, ticket: UpdateTicket, tile: Tile, image: Image) -> None:
        """The tile's new fields are in its second place."""
        if image.fields is not None:
            tile.lease, image.fields = image.fields, tile.lease
        with self._lock:
            ticket.under_way = None
            if ticket.keeps:
                ticket.kept.append(tile)
            else:
                self.images.give_back(image)

    def note_lost(self, ticket: UpdateTicket, start: int, lost: Lost) -> None:
        """Keep what the states do not tell of the elements from `start` on."""
        job, remainder = ticket.job, ticket.remainder
        if lost.grads is None:
            ticket.recovers = False
            remainder.forget_grads()
        elif ticket.recovers:
            remainder.keep_grads(lost.grads, start, job.grad)
        with self._lock:
            if ticket.keeps:
                remainder.keep_params(lost.params, start, lost.param_bits, job.param.dtype)
                self._lost_params += len(lost.params)

    # Called from the worker, between two tiles #

    def undo(self, ticket: UpdateTicket, tile: Tile) -> None:
        """Put back what an update that may have come to a tile has replaced."""
        image = ticket.job.before.get(tile.index)
        if image is None or not image.fields_bytes:
            self._ring.undo(tile)
        elif tile in ticket.kept:
            tile.lease, image.fields = image.fields, tile.lease
            tile.take_back(_HOST)

    def recover(
        self, ticket: UpdateTicket, tiles: Sequence[Tile], grad: torch.Tensor | None, param: torch.Tensor | None
    ) -> None:
        """Fill in what there was before the update of these tiles, to which it has come; all of the shard."""
        for tile in tiles:
            parts = list(parts_of(ticket.job, tile))
            if parts:
                self._recover_tile(tile, parts, grad, param)
        ticket.remainder.put(grad, param)

    def _recover_tile(
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
                    recover(
                        self._layout,
                        rule,
                        old,
                        new,
                        grad=None if grad is None else grad[start:stop],
                        param=None if param is None else param[start:stop],
                    )
        finally:
            self._ring.let_go(tile)

    def close(self) -> None:
        """Let go of the memory."""
        self.images.close()
