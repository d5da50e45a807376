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
        units: by index.
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
        for unit in self.units:
            unit.compute_copy.pins = int(unit in units)

    # First values #

    def create(self, unit: UnitParams) -> bool:
        """Allocate memory for a unit without values; the caller fills its `shard`. Return False without room."""
        if unit.update_memory is Memory.DEVICE:
            has_room = not unit.spec.offloaded or self.ledger.fits(unit.spec.nbytes)
        else:
            has_room = self._stage(unit)
        if not has_room:
            return False
        with self.critical:
            if unit.update_memory is Memory.DEVICE:
                self._allocate(unit)
            unit.field.begin_write(unit.update_memory)
        if self._device is None:
            unit.tensor.zero_()  # padding must be zero, and the memory may hold another unit's bytes
        return True

    def create_done(self, unit: UnitParams) -> None:
        """End `create`: write or upload the new values, and block until this is done."""
        unit.field.end_write(unit.update_memory)
        if unit.update_memory is Memory.HOST:
            if unit.home > Memory.HOST:  # on the device
                unit.order_behind(unit.start_upload())
            unit.write_home()
            self._leave_host(unit)

    def create_failed(self, unit: UnitParams) -> None:
        """End `create` after an error: free the memory again."""
        if unit.field.state(unit.update_memory) is State.WRITING:
            unit.field.fail_write(unit.update_memory)
            if unit.update_memory is Memory.HOST:
                self._leave_host(unit)
            elif unit.spec.offloaded:
                self._free(unit)

    def discard(self, unit: UnitParams) -> None:
        """Drop the unit's values without writing them."""
        self.await_update(unit)
        resident = unit.field.state(Memory.DEVICE) is State.VALID
        unit.field.consume()
        if resident and unit.spec.offloaded:
            self._free(unit)

    # Fetch and evict #

    def fetch_start(self, unit: UnitParams, priority: Priority, *, for_update: bool = False) -> None:
        """Start a fetch for which the ledger has room: STORED -> FETCHING.

        The unit stays STORED if it must pass through host memory and updates use all staging memory.

        Args:
            for_update: an update needs the values in host memory, so the fetch must go through it.
        """
        direct = None if self._device is None or for_update or len(unit.spec.pieces) > 1 else self._device.direct
        reads_to_device = unit.home < Memory.HOST and unit.update_memory is Memory.DEVICE  # from NVMe or a file
        reads_past_host = unit.home is Memory.NVME and direct is not None  # from NVMe straight to the device
        if not (reads_to_device or reads_past_host or unit.keeps_shard or self._stage(unit)):
            return
        with self.critical:
            self._allocate(unit)
            if reads_to_device:
                unit.read(Memory.DEVICE, priority)
            elif reads_past_host:
                assert direct is not None
                unit.read_past_host(direct)
            elif unit.keeps_shard:
                self._fetch_from_shard(unit)
            else:
                if unit.field.state(Memory.HOST) is State.ABSENT:
                    unit.read(Memory.HOST, priority)
                self.through_host[unit] = None
                unit.field.copies[Memory.HOST].pin()
                unit.field.expect(Memory.DEVICE)

    def _fetch_from_shard(self, unit: UnitParams) -> None:
        """Copy the SHARD to the unit's allocated memory. After an interrupt, free the memory if it is not used yet."""
        try:
            unit.copy_shard_to_tensor()
        except BaseException:
            if unit.compute_copy.state is State.ABSENT:  # a queued copy may use it, but reuse is ordered behind that
                self._free(unit)
                self.critical.note_rollback()
            raise

    def advance(self, unit: UnitParams) -> None:
        """Start the upload of a unit in `through_host` if its read has ended. No update may be using the unit."""
        if unit.field.arriving(Memory.DEVICE) is None:
            read = unit.field.arriving(Memory.HOST)
            if read is None or read.transfer.done():
                if read is not None:
                    unit.field.finish_move(read)
                unit.start_upload()

    def fetch_wait(self, unit: UnitParams) -> None:
        """Block until the fetch ends: FETCHING -> RESIDENT.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """
        if unit in self.through_host:
            self._finish(unit, Memory.HOST)
            self.advance(unit)
            upload = unit.field.arriving(Memory.DEVICE)
            assert upload is not None
            unit.order_behind(upload)
            self._end_fetch(unit)
        elif unit.keeps_shard:
            unit.await_shard_copy()
        else:
            self._finish(unit, Memory.DEVICE)
        if unit.compute_copy.state is not State.VALID:
            raise RuntimeError(f"unit {unit.spec.name} is not resident, and no fetch of it was started")

    def _finish(self, unit: UnitParams, memory: Memory) -> None:
        """Wait for the move that fills a copy. If it fails, end the fetch that it belongs to."""
        move = unit.field.arriving(memory)
        if move is None:
            return
        try:
            unit.wait(move)
        except BaseException:
            if unit.field.arriving(memory) is None:  # the move failed; an interrupted wait leaves it arriving
                if unit in self.through_host:
                    unit.field.give_up(Memory.DEVICE)
                    self._end_fetch(unit)
                self._free(unit)
            raise

    def _end_fetch(self, unit: UnitParams) -> None:
        del self.through_host[unit]
        unit.field.copies[Memory.HOST].unpin()
        self._leave_host(unit)

    def await_update(self, unit: UnitParams) -> None:
        """Order all later work of the compute stream behind the upload of the unit's last update."""
        upload, unit.update_upload = unit.update_upload, None
        if upload is not None and unit.field.arriving(Memory.DEVICE) is upload:  # else it has ended
            unit.order_behind(upload)

    def evict(self, unit: UnitParams) -> None:
        """Free the device memory of an unpinned unit: RESIDENT -> STORED. Another memory must have its newest value."""
        self.await_update(unit)
        assert unit.spec.offloaded
        with self.critical:
            if not unit.field.drop(Memory.DEVICE):  # a move still reads it, because an interrupt ended the wait for it
                for move in list(unit.compute_copy.moves):
                    move.wait(self._counters)
                unit.field.gone(Memory.DEVICE)
            self._free(unit)

    # Changes #

    def open_host(self, unit: UnitParams) -> bool:
        """Start copying the values to `shard`, for an update or another access. Return False without room.

        The unit must be FETCHING or RESIDENT. It is pinned until `close_host`.
        """
        if unit.update_memory is Memory.HOST:
            if not self._stage(unit):
                return False
            if unit.field.state(Memory.HOST) is State.ABSENT:
                self._finish(unit, unit.device_copy)  # a read directly from NVMe to the device may be in flight
                unit.download()
            unit.field.copies[Memory.HOST].pin()
        unit.compute_copy.pin()
        return True

    def host_wait(self, unit: UnitParams) -> None:
        """Block until `shard` has the values."""
        self._finish(unit, unit.update_memory)

    def end_pass(self) -> None:
        """End the backward pass: later downloads wait for all queued work, see [Note: downloads] in unit_params.py.

        Until here, only updates have changed units, after their gradients were computed.
        """
        for unit in self.units:
            unit.download_after = None

    def begin_change(self, unit: UnitParams) -> tuple[Move, ...]:
        """Begin a change of `shard`. Return the moves to wait for first. Pairs with `end_change`.

        Raises:
            InfinityError: the values are in existing files, which are never written.
        """
        if unit.home is Memory.FILE:
            raise InfinityError(
                f"unit `{unit.spec.name}` is read in place from {unit.spec.runs[0].file.path.parent}, which is never "
                "written: to change frozen parameters, read them with in_place=False"
            )
        unit.uploaded = 0
        return unit.field.begin_write(unit.update_memory)

    def begin_update(self, unit: UnitParams) -> tuple[Move, ...]:
        """Like `begin_change`, for an update. The model has hidden the old values, see [Note: uploads]."""
        if self._device is not None:
            unit.upload_after = self._device.link.mark()
        return self.begin_change(unit)

    def end_change(self, unit: UnitParams, *, changed: bool = True) -> None:
        """End the change, if one was begun, and upload the values if the unit has a copy on the device.

        Args:
            changed: if False, nothing was written, and nothing needs to be uploaded.
        """
        if unit.field.copies[unit.update_memory].state is not State.WRITING:
            return
        with self.critical:
            unit.field.end_write(unit.update_memory, changed=changed)
            if not changed:
                return
            if unit.keeps_shard:
                self._upload_to_shard(unit)
            elif unit.update_memory is Memory.HOST and unit.field.state(Memory.DEVICE) is not State.ABSENT:
                self._upload_newest(unit)

    def _upload_newest(self, unit: UnitParams) -> None:
        """Upload the newest values from host memory; the device has older ones, or they are arriving."""
        older = unit.field.arriving(Memory.DEVICE)
        if older is None and unit in self.through_host:
            return  # the fetch continues with the new values
        if older is not None:
            self._finish(unit, Memory.DEVICE)
        unit.update_upload = unit.start_upload()
        if unit in self.through_host:
            self._end_fetch(unit)

    def _upload_to_shard(self, unit: UnitParams) -> None:
        """Upload the newest values from host memory to the unit's SHARD."""
        for move in list(unit.field.copies[Memory.SHARD].moves):
            unit.wait(move)
        unit.order_behind(unit.start_upload())
        self._update_tensor(unit)

    def _update_tensor(self, unit: UnitParams) -> None:
        """Copy a changed SHARD to its place in the unit's tensor, if the unit is on the device."""
        if unit.field.state(Memory.DEVICE) is not State.ABSENT:
            unit.await_shard_copy()  # that of the fetch, if it has not ended
            unit.copy_shard_to_tensor()
            unit.await_shard_copy()

    def begin_device_change(self, unit: UnitParams) -> torch.Tensor:
        """Begin a change in compute-stream order. Return the trainable part of this rank's shard on the device.

        Pairs with `end_device_change`.
        """
        assert self._device is not None
        self.await_update(unit)
        unit.download_after = None
        for move in unit.field.begin_write(unit.device_copy):
            self._device.link.compute_waits(move.transfer)
        return unit.trained_on_device()

    def end_device_change(self, unit: UnitParams) -> None:
        """End the change; its work is queued, so that all later work of the compute stream runs behind it."""
        unit.field.end_write(unit.device_copy, in_order=True)
        if unit.keeps_shard:
            self._update_tensor(unit)

    def close_host(self, unit: UnitParams, *, changed: bool = True) -> None:
        """End `open_host`: the values may leave host memory. See `end_change`."""
        self.end_change(unit, changed=changed)
        if unit.update_memory is Memory.HOST:
            unit.field.copies[Memory.HOST].unpin()
            self._leave_host(unit)
        unit.compute_copy.unpin()

    # Rollback #

    def begin_speculation(self) -> None:
        """Start a rollback epoch: later writes go to the other slot on NVMe and leave the current version intact.

        Does nothing with `crash_consistent`, where commits start the epochs.
        """
        if not self.writes_every_update:
            self._swap.slots.next_epoch()

    def roll_back(self, unit: UnitParams) -> None:
        """Roll back the unit's last change, before which `UnitParams.can_roll_back` was True.

        No move may be in flight. The copy on the device is old from now on, and may be evicted.

        Raises:
            StorageError: the old values cannot be read.
        """
        self.await_update(unit)
        unit.roll_back()
        if unit in self._leaving:
            self._reap()  # otherwise `_stage` would reuse the copy, with the values that are rolled back
        if unit.home is Memory.HOST:
            unit.wait(unit.read(Memory.HOST, Priority.DEMAND))

    def close(self) -> None:
        """Wait for copies over the link, and free all memory. No other transfer may be in flight."""
        if self._device is not None and self._device.direct is not None:
            self._device.direct.close()
        for unit in self.units:
            unit.update_upload = None
            unit.close()
        self._spare.clear()

    # Device memory #

    def _allocate(self, unit: UnitParams) -> None:
        """Allocate memory for the unit's tensor, see [Note: stable storage] in unit_params.py.

        Called in the critical section that begins the unit's copy. If there is no memory, nothing has begun.
        """
        if unit.spec.offloaded:
            self.ledger.take(unit.spec.nbytes, unit.spec.name)
        try:
            with self._allocating:
                unit.buffer.allocate()
        except BaseException:
            if unit.spec.offloaded:
                self.ledger.give(unit.spec.nbytes)
            self.critical.note_rollback()
            raise
        if self._device is not None:
            unit.upload_after = self._device.link.mark()

    def _free(self, unit: UnitParams) -> None:
        with self._allocating:
            unit.buffer.free()
        self.ledger.give(unit.spec.nbytes)

    # Host memory #

    def _stage(self, unit: UnitParams) -> bool:
        """Lease memory for a HOST copy, and wait for old copies to leave if needed.

        Return False if updates use all of the memory.
        """
        if unit.lease is None:
            assert self._device is not None
            staging = self._device.staging
            self._reap()
            unit.lease = staging.try_lease(unit.spec.shard_nbytes)
            while unit.lease is None and self._leaving:
                self._finish_leaving(self._leaving[0])
                unit.lease = staging.try_lease(unit.spec.shard_nbytes)
        elif unit.field.state(Memory.HOST) is State.LEAVING and unit.home > Memory.HOST:
            self._finish_leaving(unit)  # not kept: an update on the device may have changed its home since
            return self._stage(unit)
        elif unit.field.state(Memory.HOST) is State.LEAVING:
            unit.field.keep(Memory.HOST)  # its values are still in memory
            self._leaving.remove(unit)
        return unit.lease is not None

    def _finish_leaving(self, unit: UnitParams) -> None:
        """Block until no move touches a LEAVING HOST copy."""
        self._finish(unit, unit.device_copy)
        for move in list(unit.field.copies[Memory.HOST].moves):
            unit.wait(move)
        self._reap()

    def _leave_host(self, unit: UnitParams) -> None:
        """Release staging memory that is no longer needed, as soon as no move touches it."""
        copy = unit.field.copies[Memory.HOST]
        if unit.home is Memory.HOST or copy.pins:
            return
        if copy.state is State.ARRIVING:  # the caller that requested it has failed
            self._finish(unit, Memory.HOST)
        if copy.state is State.VALID:
            unit.field.drop(Memory.HOST)
        if copy.state is State.ABSENT:
            self._release(unit)
        elif unit not in self._leaving:
            self._leaving.append(unit)

    def _reap(self) -> None:
        for unit in self._leaving:
            if unit.update_upload is not None and unit.update_upload.transfer.done():
                self._finish(unit, Memory.DEVICE)
        for unit in [unit for unit in self._leaving if unit.field.gone(Memory.HOST)]:
            self._leaving.remove(unit)
            self._release(unit)

    def _release(self, unit: UnitParams) -> None:
        lease, unit.lease = unit.lease, None
        if lease is not None:
            lease.release()
