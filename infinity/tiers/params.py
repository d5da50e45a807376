"""Parameters of every unit: a field (see copies.py) on the device, in host memory and on NVMe.

[Note: three placements]
A unit's home is the memory to which its values return when it leaves the compute device. There are three cases:

- The compute device is the CPU, and the ranks share no units. Device and host are one memory: the drive is read into
  the DEVICE copy, the model computes with it, and updates change it.
- The device has its own memory, or several ranks share the units. A unit is updated in its HOST copy, and the result is
  uploaded. The compute stream waits for the upload at the unit's next use (`await_update`). If several ranks share the
  unit, its home and its HOST copy contain this rank's shard alone. The shard is uploaded to its place in the unsharded
  tensor, and an all-gather (zero/gathering.py) fills the places of the other shards.
- Several ranks share a unit that is not offloaded. Its home is a SHARD copy on the device, in addition to the unsharded
  tensor. An update changes the SHARD copy, which is then copied to its place in that tensor, both in the order of the
  compute stream. Host memory has a copy only while the unit is accessed.

A unit whose values never change may have its home in the files that it was loaded from. Its FILE copy is read like an
NVME copy and is never written (see weight_files.py).

If the home is host memory, the HOST copy is in memory that the unit leases for the whole run. Otherwise the HOST copy
is in staging memory while a fetch or an update needs it.

With `crash_consistent` (slots.py), each unit that is not in files also has an NVME copy, and every change is written
through to it. With speculative updates, a unit whose home is NVME is written through, too, unless its old parameters
can be reconstructed from the optimizer states: the other slot then keeps the old parameters for a rollback.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from infinity.errors import InfinityError
from infinity.io import Priority
from infinity.memory import Arena, Budget, SparePages
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Memory, Move, State
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.swap import SwapSpace
from infinity.tiers.unit_params import Carriers, Device, FlatSpec, UnitParams
from infinity.tiers.weight_files import WeightFiles


class Params:
    """Move every unit's parameters. The compute thread makes all calls, except the optimizer's to `UnitParams.write`.

    Args:
        homes: home of each unit: DEVICE if it is always resident, else the memory to which it is evicted.
        budget: device memory for units that are fetched and evicted.
        arena: memory for homes in host memory.
        swap: space for homes on NVMe.
        files: existing files that contain homes.
        device: None if the model computes on the memory that updates change (a CPU, and one rank for each unit).
        double_buffered_numel: elements of a tile if units whose home is NVMe are double-buffered, because each tile is
            written as a whole to one of two slots; 0 if they are not.

    Attributes:
        is_double_buffered: whether units whose home is NVMe are double-buffered.
        writes_every_update: whether every unit that is not in files has a double-buffered NVME copy, to which every
            update is written, for crash consistency.
        ledger: counts device memory for units that are fetched and evicted.
        through_host: units that are being fetched to the device through host memory, oldest first. The HOST copy of
            each is pinned.
        units: all units, by index.
        critical: see [Note: critical sections] in critical_section.py.
    """

    def __init__(
        self,
        specs: Sequence[FlatSpec],
        homes: Sequence[Memory],
        budget: Budget,
        counters: Counters,
        *,
        arena: Arena,
        swap: SwapSpace,
        files: WeightFiles | None = None,
        device: Device | None = None,
        writes_every_update: bool = False,
        double_buffered_numel: int = 0,
    ) -> None:
        self.writes_every_update = writes_every_update
        self.is_double_buffered = double_buffered_numel > 0
        self.critical = arena.critical
        self.through_host: dict[UnitParams, None] = {}
        self._swap = swap
        self.ledger = budget
        self._counters = counters
        self._allocating = counters.stalled(StallCause.ALLOCATOR)
        self._device = device
        self._spare = SparePages()
        carriers = Carriers(swap, WeightFiles() if files is None else files, device, counters, self._spare)
        units = []
        for index, (spec, home) in enumerate(zip(specs, homes, strict=True)):
            lease = arena.lease(spec.shard_nbytes) if home is Memory.HOST else None
            extent: Extent | SlotExtent | None = None
            if home is Memory.FILE:
                extent = carriers.files.add(spec.runs, spec.sharding.rank * spec.shard_nbytes, spec.shard_nbytes)
            elif (
                double_buffered_numel
                and spec.shard_nbytes
                and (home is Memory.NVME or (writes_every_update and not spec.runs))
            ):
                extent = swap.reserve_slots(spec.shard_nbytes, spec.bounds(double_buffered_numel))
            elif home is Memory.NVME:
                extent = swap.reserve(spec.shard_nbytes)
            units.append(UnitParams(index, spec, home, lease, extent, carriers))
        self.units = tuple(units)
        self._leaving: list[UnitParams] = []  # whose staging memory is still touched by a move

    # State #

    def reset_pins(self, units: Collection[UnitParams]) -> None:
        """Set one pin on each of these units and no pin on all others."""
        for params in self.units:
            params.compute_copy.pins = int(params in units)

    # First values #

    def create(self, params: UnitParams) -> bool:
        """Allocate memory for a unit without values; the caller fills its `shard`. Return False without room."""
        if params.update_memory is Memory.DEVICE:
            has_room = not params.spec.offloaded or self.ledger.fits(params.spec.nbytes)
        else:
            has_room = self._stage(params)
        if not has_room:
            return False
        with self.critical:
            if params.update_memory is Memory.DEVICE:
                self._allocate(params)
            params.field.begin_write(params.update_memory)
        if self._device is None:
            params.tensor.zero_()  # padding must be zero, and the memory may hold another unit's bytes
        return True

    def create_done(self, params: UnitParams) -> None:
        """End `create`: write or upload the new values, and block until this is done."""
        params.field.end_write(params.update_memory)
        if params.update_memory is Memory.HOST:
            if params.home > Memory.HOST:  # on the device
                params.order_behind(params.start_upload())
            params.write_home()
            self._leave_host(params)

    def create_failed(self, params: UnitParams) -> None:
        """End `create` after an error: free the memory again."""
        if params.field.state(params.update_memory) is State.WRITING:
            params.field.fail_write(params.update_memory)
            if params.update_memory is Memory.HOST:
                self._leave_host(params)
            elif params.spec.offloaded:
                self._free(params)

    def discard(self, params: UnitParams) -> None:
        """Drop the unit's values without writing them."""
        self.await_update(params)
        resident = params.field.state(Memory.DEVICE) is State.VALID
        params.field.consume()
        if resident and params.spec.offloaded:
            self._free(params)

    # Fetch and evict #

    def fetch_start(self, params: UnitParams, priority: Priority, *, for_update: bool = False) -> None:
        """Start a fetch for which the ledger has room: STORED -> FETCHING.

        The unit stays STORED if it must pass through host memory and updates use all staging memory.

        Args:
            for_update: an update needs the values in host memory, so the fetch must go through it.
        """
        direct = None if self._device is None or for_update or len(params.spec.pieces) > 1 else self._device.direct
        reads_to_device = params.home < Memory.HOST and params.update_memory is Memory.DEVICE  # from NVMe or a file
        reads_past_host = params.home is Memory.NVME and direct is not None  # from NVMe straight to the device
        if not (reads_to_device or reads_past_host or params.keeps_shard or self._stage(params)):
            return
        with self.critical:
            self._allocate(params)
            if reads_to_device:
                params.read(Memory.DEVICE, priority)
            elif reads_past_host:
                assert direct is not None
                params.read_past_host(direct)
            elif params.keeps_shard:
                self._fetch_from_shard(params)
            else:
                if params.field.state(Memory.HOST) is State.ABSENT:
                    params.read(Memory.HOST, priority)
                self.through_host[params] = None
                params.field.copies[Memory.HOST].pin()
                params.field.expect(Memory.DEVICE)

    def _fetch_from_shard(self, params: UnitParams) -> None:
        """Copy the SHARD to the unit's allocated memory. After an interrupt, free the memory if it is not used yet."""
        try:
            params.copy_shard_to_tensor()
        except BaseException:
            if params.compute_copy.state is State.ABSENT:  # a queued copy may use it, but reuse is ordered behind that
                self._free(params)
                self.critical.note_rollback()
            raise

    def advance(self, params: UnitParams) -> None:
        """Start the upload of a unit in `through_host` if its read has ended. No update may be using the unit."""
        if params.field.arriving(Memory.DEVICE) is None:
            read = params.field.arriving(Memory.HOST)
            if read is None or read.transfer.done():
                if read is not None:
                    params.field.finish_move(read)
                params.start_upload()

    def fetch_wait(self, params: UnitParams) -> None:
        """Block until the fetch ends: FETCHING -> RESIDENT.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """
        if params in self.through_host:
            self._finish(params, Memory.HOST)
            self.advance(params)
            upload = params.field.arriving(Memory.DEVICE)
            assert upload is not None
            params.order_behind(upload)
            self._end_fetch(params)
        elif params.keeps_shard:
            params.await_shard_copy()
        else:
            self._finish(params, Memory.DEVICE)
        if params.compute_copy.state is not State.VALID:
            raise RuntimeError(f"unit {params.spec.name} is not resident, and no fetch of it was started")

    def _finish(self, params: UnitParams, memory: Memory) -> None:
        """Wait for the move that fills a copy. If it fails, end the fetch that it belongs to."""
        move = params.field.arriving(memory)
        if move is None:
            return
        try:
            params.wait(move)
        except BaseException:
            if params.field.arriving(memory) is None:  # the move failed; an interrupted wait leaves it arriving
                if params in self.through_host:
                    params.field.give_up(Memory.DEVICE)
                    self._end_fetch(params)
                self._free(params)
            raise

    def _end_fetch(self, params: UnitParams) -> None:
        del self.through_host[params]
        params.field.copies[Memory.HOST].unpin()
        self._leave_host(params)

    def await_update(self, params: UnitParams) -> None:
        """Order all later work of the compute stream behind the upload of the unit's last update."""
        upload, params.update_upload = params.update_upload, None
        if upload is not None and params.field.arriving(Memory.DEVICE) is upload:  # else it has ended
            params.order_behind(upload)

    def evict(self, params: UnitParams) -> None:
        """Free the device memory of an unpinned unit: RESIDENT -> STORED. Another memory must have its newest value."""
        self.await_update(params)
        assert params.spec.offloaded
        with self.critical:
            if not params.field.drop(
                Memory.DEVICE
            ):  # a move still reads it, because an interrupt ended the wait for it
                for move in list(params.compute_copy.moves):
                    move.wait(self._counters)
                params.field.gone(Memory.DEVICE)
            self._free(params)

    # Changes #

    def open_host(self, params: UnitParams) -> bool:
        """Start copying the values to `shard`, for an update or another access. Return False without room.

        The unit must be FETCHING or RESIDENT. It is pinned until `close_host`.
        """
        if params.update_memory is Memory.HOST:
            if not self._stage(params):
                return False
            if params.field.state(Memory.HOST) is State.ABSENT:
                self._finish(params, params.device_copy)  # a read directly from NVMe to the device may be in flight
                params.download()
            params.field.copies[Memory.HOST].pin()
        params.compute_copy.pin()
        return True

    def host_wait(self, params: UnitParams) -> None:
        """Block until `shard` has the values."""
        self._finish(params, params.update_memory)

    def end_pass(self) -> None:
        """End the backward pass: later downloads wait for all queued work, see [Note: downloads] in unit_params.py.

        Until here, only updates have changed units, after their gradients were computed.
        """
        for params in self.units:
            params.download_after = None

    def begin_change(self, params: UnitParams) -> tuple[Move, ...]:
        """Begin a change of `shard`. Return the moves to wait for first. Pairs with `end_change`.

        Raises:
            InfinityError: the values are in existing files, which are never written.
        """
        if params.home is Memory.FILE:
            raise InfinityError(
                f"unit `{params.spec.name}` is read in place from {params.spec.runs[0].file.path.parent}, which is "
                "never written: to change frozen parameters, read them with in_place=False"
            )
        params.uploaded = 0
        return params.field.begin_write(params.update_memory)

    def begin_update(self, params: UnitParams) -> tuple[Move, ...]:
        """Like `begin_change`, for an update. The model has hidden the old values, see [Note: uploads]."""
        if self._device is not None:
            params.upload_after = self._device.link.mark()
        return self.begin_change(params)

    def end_change(self, params: UnitParams, *, changed: bool = True) -> None:
        """End the change, if one was begun, and upload the values if the unit has a copy on the device.

        Args:
            changed: if False, nothing was written, and nothing needs to be uploaded.
        """
        if params.field.copies[params.update_memory].state is not State.WRITING:
            return
        with self.critical:
            params.field.end_write(params.update_memory, changed=changed)
            if not changed:
                return
            if params.keeps_shard:
                self._upload_to_shard(params)
            elif params.update_memory is Memory.HOST and params.field.state(Memory.DEVICE) is not State.ABSENT:
                self._upload_newest(params)

    def _upload_newest(self, params: UnitParams) -> None:
        """Upload the newest values from host memory; the device has older ones, or they are arriving."""
        older = params.field.arriving(Memory.DEVICE)
        if older is None and params in self.through_host:
            return  # the fetch continues with the new values
        if older is not None:
            self._finish(params, Memory.DEVICE)
        params.update_upload = params.start_upload()
        if params in self.through_host:
            self._end_fetch(params)

    def _upload_to_shard(self, params: UnitParams) -> None:
        """Upload the newest values from host memory to the unit's SHARD."""
        for move in list(params.field.copies[Memory.SHARD].moves):
            params.wait(move)
        params.order_behind(params.start_upload())
        self._update_tensor(params)

    def _update_tensor(self, params: UnitParams) -> None:
        """Copy a changed SHARD to its place in the unit's tensor, if the unit is on the device."""
        if params.field.state(Memory.DEVICE) is not State.ABSENT:
            params.await_shard_copy()  # that of the fetch, if it has not ended
            params.copy_shard_to_tensor()
            params.await_shard_copy()

    def begin_device_change(self, params: UnitParams) -> torch.Tensor:
        """Begin a change in compute-stream order. Return the trainable part of this rank's shard on the device.

        Pairs with `end_device_change`.
        """
        assert self._device is not None
        self.await_update(params)
        params.download_after = None
        for move in params.field.begin_write(params.device_copy):
            self._device.link.compute_waits(move.transfer)
        return params.trained_on_device()

    def end_device_change(self, params: UnitParams) -> None:
        """End the change; its work is queued, so that all later work of the compute stream runs behind it."""
        params.field.end_write(params.device_copy, in_order=True)
        if params.keeps_shard:
            self._update_tensor(params)

    def close_host(self, params: UnitParams, *, changed: bool = True) -> None:
        """End `open_host`: the values may leave host memory. See `end_change`."""
        self.end_change(params, changed=changed)
        if params.update_memory is Memory.HOST:
            params.field.copies[Memory.HOST].unpin()
            self._leave_host(params)
        params.compute_copy.unpin()

    # Rollback #

    def begin_speculation(self) -> None:
        """Start a rollback epoch: later writes go to the other slot on NVMe and leave the current version intact.

        Does nothing with `crash_consistent`, where commits start the epochs.
        """
        if not self.writes_every_update:
            self._swap.slots.next_epoch()

    def roll_back(self, params: UnitParams) -> None:
        """Roll back the unit's last change, before which `UnitParams.can_roll_back` was True.

        No move may be in flight. The copy on the device is old from now on, and may be evicted.

        Raises:
            StorageError: the old values cannot be read.
        """
        self.await_update(params)
        params.roll_back()
        if params in self._leaving:
            self._reap()  # otherwise `_stage` would reuse the copy, with the values that are rolled back
        if params.home is Memory.HOST:
            params.wait(params.read(Memory.HOST, Priority.DEMAND))

    def close(self) -> None:
        """Wait for copies over the link, and free all memory. No other transfer may be in flight."""
        if self._device is not None and self._device.direct is not None:
            self._device.direct.close()
        for params in self.units:
            params.update_upload = None
            params.close()
        self._spare.clear()

    # Device memory #

    def _allocate(self, params: UnitParams) -> None:
        """Allocate memory for the unit's tensor, see [Note: stable storage] in unit_params.py.

        Called in the critical section that begins the unit's copy. If there is no memory, nothing has begun.
        """
        if params.spec.offloaded:
            self.ledger.take(params.spec.nbytes, params.spec.name)
        try:
            with self._allocating:
                params.buffer.allocate()
        except BaseException:
            if params.spec.offloaded:
                self.ledger.give(params.spec.nbytes)
            self.critical.note_rollback()
            raise
        if self._device is not None:
            params.upload_after = self._device.link.mark()

    def _free(self, params: UnitParams) -> None:
        with self._allocating:
            params.buffer.free()
        self.ledger.give(params.spec.nbytes)

    # Host memory #

    def _stage(self, params: UnitParams) -> bool:
        """Lease memory for a HOST copy, and wait for old copies to leave if needed.

        Return False if updates use all of the memory.
        """
        if params.lease is None:
            assert self._device is not None
            staging = self._device.staging
            self._reap()
            params.lease = staging.try_lease(params.spec.shard_nbytes)
            while params.lease is None and self._leaving:
                self._finish_leaving(self._leaving[0])
                params.lease = staging.try_lease(params.spec.shard_nbytes)
        elif params.field.state(Memory.HOST) is State.LEAVING and params.home > Memory.HOST:
            self._finish_leaving(params)  # not kept: an update on the device may have changed its home since
            return self._stage(params)
        elif params.field.state(Memory.HOST) is State.LEAVING:
            params.field.keep(Memory.HOST)  # its values are still in memory
            self._leaving.remove(params)
        return params.lease is not None

    def _finish_leaving(self, params: UnitParams) -> None:
        """Block until no move touches a LEAVING HOST copy."""
        self._finish(params, params.device_copy)
        for move in list(params.field.copies[Memory.HOST].moves):
            params.wait(move)
        self._reap()

    def _leave_host(self, params: UnitParams) -> None:
        """Release staging memory that is no longer needed, as soon as no move touches it."""
        copy = params.field.copies[Memory.HOST]
        if params.home is Memory.HOST or copy.pins:
            return
        if copy.state is State.ARRIVING:  # the caller that requested it has failed
            self._finish(params, Memory.HOST)
        if copy.state is State.VALID:
            params.field.drop(Memory.HOST)
        if copy.state is State.ABSENT:
            self._release(params)
        elif params not in self._leaving:
            self._leaving.append(params)

    def _reap(self) -> None:
        for params in self._leaving:
            if params.update_upload is not None and params.update_upload.transfer.done():
                self._finish(params, Memory.DEVICE)
        for params in [params for params in self._leaving if params.field.gone(Memory.HOST)]:
            self._leaving.remove(params)
            self._release(params)

    def _release(self, params: UnitParams) -> None:
        lease, params.lease = params.lease, None
        if lease is not None:
            lease.release()
