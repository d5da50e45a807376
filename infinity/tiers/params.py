"""Parameters of every unit: a field (see copies.py) on the device, in host memory and on NVMe.

[Note: three placements]
A unit's home is the memory to which its values return when it leaves the compute device. There are three cases:

- The compute device is the CPU, and the ranks share no units. Device and host are one memory: the drive is read into
  the DEVICE copy, the model computes with it, and updates change it.
- The device has its own memory, or several ranks share the units. A unit is updated in its HOST copy, and the result is
  uploaded. The compute stream waits for the upload at the unit's next use (`await_update`). If several ranks share the
  unit, its home and its HOST copy contain this rank's shard alone, which also has a place in the tensor on the device.
  An all-gather, outside of this file, fills the places of the other ranks.
- Several ranks share a unit that is not offloaded. Its home is a SHARD copy on the device, in addition to the tensor.
  An update changes the SHARD copy, which is then copied to its place in the tensor, both in the order of the compute
  stream. Host memory has a copy only while the unit is accessed.

A unit whose values never change may have its home in the files that it was loaded from. Its FILE copy is read like an
NVME copy and is never written (see weight_files.py).

If the home is host memory, the HOST copy is in memory that the unit leases for the whole run. Otherwise the HOST copy
is in staging memory while a fetch or an update needs it.

With `crash_consistent` (slots.py), each unit that is not in files also has an NVME copy, and every change is written
through to it. With speculative updates, units whose home is NVME are written through if their old parameters cannot be
reconstructed from the optimizer states: the other slot then holds the only copy of the old parameters.
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
    """Copies of every unit's parameters. The optimizer's thread calls `UnitParams.write`, one thread all the rest.

    Args:
        homes: home of each unit: DEVICE if it is always resident, else the memory to which it is evicted.
        budget: device memory for units that are fetched and evicted.
        arena: memory for homes in host memory.
        swap: space for homes on NVMe.
        files: existing files that contain homes.
        device: None if the model computes on the memory that updates change (a CPU, and one rank for each unit).
        written_through: whether every unit that is not in files has a double-buffered copy on NVMe.
        double_buffered_numel: 0 if units whose home is NVMe are not double-buffered; else the elements of a tile,
            because each tile of a unit is written as a whole to one of its two slots.

    Attributes:
        is_double_buffered: whether units whose home is NVMe are double-buffered.
        writes_every_update: whether every update is written to NVMe, for crash consistency.
        ledger: counts device memory for units that are fetched and evicted.
        passing: units that are being fetched to the device through host memory, oldest first. The HOST copy of each is
            pinned.
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
        written_through: bool = False,
        double_buffered_numel: int = 0,
    ) -> None:
        self.writes_every_update = written_through
        self.is_double_buffered = double_buffered_numel > 0
        self.critical = arena.critical
        self.passing: dict[UnitParams, None] = {}
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
                and (home is Memory.NVME or (written_through and not spec.runs))
            ):
                extent = swap.reserve_slots(spec.shard_nbytes, spec.bounds(double_buffered_numel))
            elif home is Memory.NVME:
                extent = swap.reserve(spec.shard_nbytes)
            units.append(UnitParams(index, spec, home, lease, extent, carriers))
        self.units = tuple(units)
        self._leaving: list[UnitParams] = []  # whose staging memory is still touched by a move

    # State #

    def keep_pins(self, units: Collection[UnitParams]) -> None:
        """Set one pin on each of these units and no pin on all others."""
        for each in self.units:
            each.compute_copy.pins = int(each in units)

    # First values #

    def create(self, each: UnitParams) -> bool:
        """Allocate memory for a unit without values; the caller fills its `shard`. Return False without room."""
        if each.update_memory is Memory.DEVICE:
            has_room = not each.spec.offloaded or self.ledger.fits(each.spec.nbytes)
        else:
            has_room = self._stage(each)
        if not has_room:
            return False
        with self.critical:
            if each.update_memory is Memory.DEVICE:
                self._allocate(each)
            each.field.begin_write(each.update_memory)
        if self._device is None:
            each.tensor.zero_()  # padding must be zero, and the memory may hold another unit's bytes
        return True

    def create_done(self, each: UnitParams) -> None:
        """End `create`: write or upload the new values, and block until this is done."""
        each.field.end_write(each.update_memory)
        if each.update_memory is Memory.HOST:
            if each.home > Memory.HOST:  # on the device
                each.order_behind(each.start_upload())
            each.write_home()
            self._leave_host(each)

    def create_failed(self, each: UnitParams) -> None:
        """End `create` after an error: free the memory again."""
        if each.field.state(each.update_memory) is State.WRITING:
            each.field.fail_write(each.update_memory)
            if each.update_memory is Memory.HOST:
                self._leave_host(each)
            elif each.spec.offloaded:
                self._free(each)

    def discard(self, each: UnitParams) -> None:
        """Drop the unit's values without writing them."""
        self.await_update(each)
        resident = each.field.state(Memory.DEVICE) is State.VALID
        each.field.consume()
        if resident and each.spec.offloaded:
            self._free(each)

    # Fetch and evict #

    def fetch_start(self, each: UnitParams, priority: Priority, *, for_update: bool = False) -> None:
        """Start a fetch for which the ledger has room: STORED -> FETCHING.

        The unit stays STORED if it must pass through host memory and updates use all staging memory.

        Args:
            for_update: an update needs the values in host memory, so the fetch must go through it.
        """
        direct = None if self._device is None or for_update or len(each.spec.pieces) > 1 else self._device.direct
        reads_to_device = each.home < Memory.HOST and each.update_memory is Memory.DEVICE  # from NVMe or a file
        reads_past_host = each.home is Memory.NVME and direct is not None
        if not (reads_to_device or reads_past_host or each.keeps_shard or self._stage(each)):
            return
        with self.critical:
            self._allocate(each)
            if reads_to_device:
                each.read(Memory.DEVICE, priority)
            elif reads_past_host:
                assert direct is not None
                each.read_past_host(direct)
            elif each.keeps_shard:
                self._fetch_from_shard(each)
            else:
                if each.field.state(Memory.HOST) is State.ABSENT:
                    each.read(Memory.HOST, priority)
                self.passing[each] = None
                each.field.copies[Memory.HOST].pin()
                each.field.expect(Memory.DEVICE)

    def _fetch_from_shard(self, each: UnitParams) -> None:
        """Copy the SHARD to the unit's allocated memory. After an interrupt, free the memory if it is not used yet."""
        try:
            each.copy_shard_to_tensor()
        except BaseException:
            if each.compute_copy.state is State.ABSENT:  # a queued copy may use it, but reuse is ordered behind that
                self._free(each)
                self.critical.note_rollback()
            raise

    def advance(self, each: UnitParams) -> None:
        """Start the upload of a passing unit if its read has ended; no update may be using the unit."""
        if each.field.arriving(Memory.DEVICE) is None:
            read = each.field.arriving(Memory.HOST)
            if read is None or read.transfer.done():
                if read is not None:
                    each.field.finish_move(read)
                each.start_upload()

    def fetch_wait(self, each: UnitParams) -> None:
        """Block until the fetch ends: FETCHING -> RESIDENT.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """
        if each in self.passing:
            self._finish(each, Memory.HOST)
            self.advance(each)
            upload = each.field.arriving(Memory.DEVICE)
            assert upload is not None
            each.order_behind(upload)
            self._end_fetch(each)
        elif each.keeps_shard:
            each.await_shard_copy()
        else:
            self._finish(each, Memory.DEVICE)
        if each.compute_copy.state is not State.VALID:
            raise RuntimeError(f"unit {each.spec.name} is not resident, and no fetch of it was started")

    def _finish(self, each: UnitParams, memory: Memory) -> None:
        """Wait for the move that fills a copy. If it fails, end the fetch that it belongs to."""
        move = each.field.arriving(memory)
        if move is None:
            return
        try:
            each.wait(move)
        except BaseException:
            if each.field.arriving(memory) is None:  # the move failed; an interrupted wait leaves it arriving
                if each in self.passing:
                    each.field.give_up(Memory.DEVICE)
                    self._end_fetch(each)
                self._free(each)
            raise

    def _end_fetch(self, each: UnitParams) -> None:
        del self.passing[each]
        each.field.copies[Memory.HOST].unpin()
        self._leave_host(each)

    def await_update(self, each: UnitParams) -> None:
        """Order all later work of the compute stream behind the upload of the unit's last update."""
        upload, each.update_upload = each.update_upload, None
        if upload is not None and each.field.arriving(Memory.DEVICE) is upload:  # else it has ended
            each.order_behind(upload)

    def evict(self, each: UnitParams) -> None:
        """Free the device memory of an unpinned unit: RESIDENT -> STORED. Its newest value is in another memory."""
        self.await_update(each)
        assert each.spec.offloaded
        with self.critical:
            if not each.field.drop(Memory.DEVICE):  # a copy from it goes on, because its wait was interrupted
                for move in list(each.compute_copy.moves):
                    move.wait(self._counters)
                each.field.gone(Memory.DEVICE)
            self._free(each)

    # Changes #

    def open_host(self, each: UnitParams) -> bool:
        """Start copying the values to `shard`, for an update or another access. Return False without room.

        The unit must be FETCHING or RESIDENT. It is pinned until `close_host`.
        """
        if each.update_memory is Memory.HOST:
            if not self._stage(each):
                return False
            if each.field.state(Memory.HOST) is State.ABSENT:
                self._finish(each, each.device_copy)  # a read directly from NVMe to the device may be in flight
                each.download()
            each.field.copies[Memory.HOST].pin()
        each.compute_copy.pin()
        return True

    def host_wait(self, each: UnitParams) -> None:
        """Block until `shard` has the values."""
        self._finish(each, each.update_memory)

    def end_pass(self) -> None:
        """End the backward pass: later downloads wait for all queued work, see [Note: downloads] in unit_params.py.

        Until here, only updates have changed units, after their gradients were computed.
        """
        for each in self.units:
            each.download_after = None

    def begin_change(self, each: UnitParams) -> tuple[Move, ...]:
        """Begin a change of `shard`. Return the moves to wait for first. Pairs with `end_change`.

        Raises:
            InfinityError: the values are in existing files, which are never written.
        """
        if each.home is Memory.FILE:
            raise InfinityError(
                f"unit `{each.spec.name}` is read in place from {each.spec.runs[0].file.path.parent}, which is never "
                "written: to change frozen parameters, read them with in_place=False"
            )
        each.uploaded = 0
        return each.field.begin_write(each.update_memory)

    def begin_update(self, each: UnitParams) -> tuple[Move, ...]:
        """Like `begin_change`, for an update. The model has hidden the old values, see [Note: uploads]."""
        if self._device is not None:
            each.upload_after = self._device.link.mark()
        return self.begin_change(each)

    def end_change(self, each: UnitParams, *, changed: bool = True) -> None:
        """End the change, if one was begun, and upload the values if the unit has a copy on the device.

        Args:
            changed: if False, nothing was written, and nothing needs to be uploaded.
        """
        if each.field.copies[each.update_memory].state is not State.WRITING:
            return
        with self.critical:
            each.field.end_write(each.update_memory, changed=changed)
            if not changed:
                return
            if each.keeps_shard:
                self._upload_to_shard(each)
            elif each.update_memory is Memory.HOST and each.field.state(Memory.DEVICE) is not State.ABSENT:
                self._upload_newest(each)

    def _upload_newest(self, each: UnitParams) -> None:
        """Upload the newest values from host memory; the device has older ones, or they are arriving."""
        older = each.field.arriving(Memory.DEVICE)
        if older is None and each in self.passing:
            return  # the fetch continues with the new values
        if older is not None:
            self._finish(each, Memory.DEVICE)
        each.update_upload = each.start_upload()
        if each in self.passing:
            self._end_fetch(each)

    def _upload_to_shard(self, each: UnitParams) -> None:
        """Upload the newest values from host memory to the unit's SHARD."""
        for move in list(each.field.copies[Memory.SHARD].moves):
            each.wait(move)
        each.order_behind(each.start_upload())
        self._update_tensor(each)

    def _update_tensor(self, each: UnitParams) -> None:
        """Copy a changed SHARD to its place in the unit's tensor, if the unit is on the device."""
        if each.field.state(Memory.DEVICE) is not State.ABSENT:
            each.await_shard_copy()  # that of the fetch, if it has not ended
            each.copy_shard_to_tensor()
            each.await_shard_copy()

    def begin_device_change(self, each: UnitParams) -> torch.Tensor:
        """Begin a change in compute-stream order. Return the trainable part of this rank's shard on the device.

        Pairs with `end_device_change`.
        """
        assert self._device is not None
        self.await_update(each)
        each.download_after = None
        for move in each.field.begin_write(each.device_copy):
            self._device.link.compute_waits(move.transfer)
        return each.trained_on_device()

    def end_device_change(self, each: UnitParams) -> None:
        """End the change; its work is queued, so that all later work of the compute stream runs behind it."""
        each.field.end_write(each.device_copy, in_order=True)
        if each.keeps_shard:
            self._update_tensor(each)

    def close_host(self, each: UnitParams, *, changed: bool = True) -> None:
        """End `open_host`: the values may leave host memory. See `end_change`."""
        self.end_change(each, changed=changed)
        if each.update_memory is Memory.HOST:
            each.field.copies[Memory.HOST].unpin()
            self._leave_host(each)
        each.compute_copy.unpin()

    # Rollback #

    def begin_speculation(self) -> None:
        """Start a rollback epoch: later writes go to the other slot on NVMe and leave the current version intact.

        Does nothing with `crash_consistent`, where commits start the epochs.
        """
        if not self.writes_every_update:
            self._swap.slots.next_epoch()

    def roll_back(self, each: UnitParams) -> None:
        """Roll back the unit's last change, before which `UnitParams.can_roll_back` was True.

        No move may be in flight. The copy on the device is old from now on, and may be evicted.

        Raises:
            StorageError: the old values cannot be read.
        """
        self.await_update(each)
        each.roll_back()
        if each in self._leaving:
            self._reap()  # otherwise `_stage` would reuse the copy, with the values that are rolled back
        if each.home is Memory.HOST:
            each.wait(each.read(Memory.HOST, Priority.DEMAND))

    def close(self) -> None:
        """Wait for copies over the link, and free all memory. No other transfer may be in flight."""
        if self._device is not None and self._device.direct is not None:
            self._device.direct.close()
        for each in self.units:
            each.update_upload = None
            each.close()
        self._spare.clear()

    # Device memory #

    def _allocate(self, each: UnitParams) -> None:
        """Allocate memory for the unit's tensor, see [Note: stable storage] in unit_params.py.

        Called in the critical section that begins the unit's copy. If there is no memory, nothing has begun.
        """
        if each.spec.offloaded:
            self.ledger.take(each.spec.nbytes, each.spec.name)
        try:
            with self._allocating:
                each.buffer.allocate()
        except BaseException:
            if each.spec.offloaded:
                self.ledger.give(each.spec.nbytes)
            self.critical.note_rollback()
            raise
        if self._device is not None:
            each.upload_after = self._device.link.mark()

    def _free(self, each: UnitParams) -> None:
        with self._allocating:
            each.buffer.free()
        self.ledger.give(each.spec.nbytes)

    # Host memory #

    def _stage(self, each: UnitParams) -> bool:
        """Lease memory for a HOST copy, and wait for old copies to leave if needed.

        Return False if updates use all of the memory.
        """
        if each.lease is None:
            assert self._device is not None
            staging = self._device.staging
            self._reap()
            each.lease = staging.try_lease(each.spec.shard_nbytes)
            while each.lease is None and self._leaving:
                self._finish_leaving(self._leaving[0])
                each.lease = staging.try_lease(each.spec.shard_nbytes)
        elif each.field.state(Memory.HOST) is State.LEAVING and each.home > Memory.HOST:
            self._finish_leaving(each)  # not kept: an update on the device may have changed its home since
            return self._stage(each)
        elif each.field.state(Memory.HOST) is State.LEAVING:
            each.field.keep(Memory.HOST)  # its values are still in memory
            self._leaving.remove(each)
        return each.lease is not None

    def _finish_leaving(self, each: UnitParams) -> None:
        """Block until no move touches a LEAVING HOST copy."""
        self._finish(each, each.device_copy)
        for move in list(each.field.copies[Memory.HOST].moves):
            each.wait(move)
        self._reap()

    def _leave_host(self, each: UnitParams) -> None:
        """Release staging memory that is no longer needed, as soon as no move touches it."""
        copy = each.field.copies[Memory.HOST]
        if each.home is Memory.HOST or copy.pins:
            return
        if copy.state is State.ARRIVING:  # the caller that requested it has failed
            self._finish(each, Memory.HOST)
        if copy.state is State.VALID:
            each.field.drop(Memory.HOST)
        if copy.state is State.ABSENT:
            self._release(each)
        elif each not in self._leaving:
            self._leaving.append(each)

    def _reap(self) -> None:
        for each in self._leaving:
            if each.update_upload is not None and each.update_upload.transfer.done():
                self._finish(each, Memory.DEVICE)
        for each in [each for each in self._leaving if each.field.gone(Memory.HOST)]:
            self._leaving.remove(each)
            self._release(each)

    def _release(self, each: UnitParams) -> None:
        lease, each.lease = each.lease, None
        if lease is not None:
            lease.release()
