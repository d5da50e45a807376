"""Parameters of every unit: a field each, with copies on the compute device, in host memory and in the NVMe tier.

[Note: three placements]
Where the compute device is the CPU, device and host are one memory: a unit is computed on and updated straight in the
buffer that the disk filled, its DEVICE copy. A device with memory of its own has a link; there a unit is updated in its
HOST copy, and what is updated goes up; compute waits for that at the unit's next use (`await_update`). Of a unit that
several ranks share, home and HOST copy are this rank's shard, which has its place in the tensor on the device; the
others' places are filled by an all-gather, which is not this file's business.

Where nothing is offloaded, that home is a SHARD copy: on the device, too, beside the tensor. The unit is updated there
and copied to its place, both in the order of the compute stream; host memory has a copy while somebody looks.

A unit whose values nobody changes may have its home in the files that they came in: its FILE copy is read where an
NVME copy would be, and there is nothing to write to (see weight_files.py).

A HOST copy lies in the unit's home lease, or, where the home is elsewhere, in staging memory while a fetch or an update
needs it.

Where every step is to stay on the drives (slots.py), each unit that is not a file's has an NVME copy beside its home:
what an update or anybody else changes is written through to it. Where updates run ahead, units that live on the drive
are written through, too, if the optimizer's states do not tell what they were before: then that is in the other slot,
and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from infinity.errors import InfinityError
from infinity.io import IoFuture, Priority
from infinity.memory import Arena, Budget, SparePages
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Memory, Move, State, Transfer
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.swap import SwapSpace
from infinity.tiers.unit_params import Carriers, Device, FlatSpec, Residency, UnitParams
from infinity.tiers.weight_files import WeightFiles


class Params:
    """Copies of every unit's parameters. One thread at a time drives it; `write_tile` is called from the optimizer's.

    Args:
        homes: of each unit: DEVICE, or the memory below that it has a place in.
        budget: device memory for units that come and go.
        arena: host memory for homes there.
        swap: where the other homes are.
        files: where homes are that somebody else wrote.
        device: None if the compute device is the CPU.
        written_through: every unit has a place on the drives, of two slots; else none but those that live there.
        slotted: elements of a tile, where units that live on the drives have two slots; 0 where they have one.

    Attributes:
        has_slots: units that live on the drives have two slots.
        keeps_steps: what an update changes is always written.
        ledger: of device memory for units that come and go.
        passing: units on their way to the device through host memory, oldest first; each has pinned its HOST copy.
        units: by index.
        handing_over: see [Note: hand-overs] in hand_over.py.
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
        slotted: int = 0,
    ) -> None:
        self.keeps_steps = written_through
        self.has_slots = slotted > 0
        self.specs = tuple(specs)
        self.handing_over = arena.handing_over
        self.passing: dict[int, None] = {}
        self._swap = swap
        self.ledger = budget
        self._counters = counters
        self._device = device
        self._spare = SparePages()
        by = Carriers(swap, WeightFiles() if files is None else files, device, counters, self._spare)
        units = []
        for index, (spec, home) in enumerate(zip(specs, homes, strict=True)):
            lease = arena.lease(spec.shard_nbytes) if home is Memory.HOST else None
            extent: Extent | SlotExtent | None = None
            if home is Memory.FILE:
                extent = by.files.add(spec.runs, spec.sharding.rank * spec.shard_nbytes, spec.shard_nbytes)
            elif slotted and spec.shard_nbytes and (home is Memory.NVME or (written_through and not spec.runs)):
                extent = swap.reserve_slots(spec.shard_nbytes, spec.bounds(slotted))
            elif home is Memory.NVME:
                extent = swap.reserve(spec.shard_nbytes)
            units.append(UnitParams(index, spec, home, lease, extent, by))
        self.units = tuple(units)
        self._leaving: list[UnitParams] = []  # whose staging memory something still touches

    # State #

    def residency(self, unit: int) -> Residency:
        return self.units[unit].residency

    def pin(self, unit: int) -> None:
        """Keep the unit from being evicted; pairs with `unpin`."""
        self.units[unit].field.pin(Memory.DEVICE)

    def unpin(self, unit: int) -> None:
        self.units[unit].field.unpin(Memory.DEVICE)

    def keep_pins(self, units: Collection[int]) -> None:
        """One pin on each of these units, and no other: nothing is in use."""
        for index, each in enumerate(self.units):
            each.field.copies[Memory.DEVICE].pins = int(index in units)

    def is_pinned(self, unit: int, times: int = 0) -> bool:
        """The unit is pinned more often than so many times."""
        return self.units[unit].field.copies[Memory.DEVICE].pins > times

    def tensor(self, unit: int) -> torch.Tensor:
        """The flat tensor on the compute device; its memory is valid while the unit is RESIDENT."""
        return self.units[unit].tensor

    def host_tensor(self, unit: int) -> torch.Tensor:
        """This rank's shard where it is changed; valid from `open_host` to `close_host` once `host_wait` is over."""
        return self.units[unit].shard

    @property
    def budget(self) -> str:
        """Key of the memory in which values are computed on."""
        return "tiering.host_memory" if self._device is None else "tiering.device_memory"

    # First values #

    def create(self, unit: int) -> bool:
        """Give a unit that has no values memory, to be written through `host_tensor`; False if there is no room."""
        each = self.units[unit]
        if not (self._allocate(each) if each.site is Memory.DEVICE else self._stage(each)):
            return False
        each.field.begin_write(each.site)
        if self._device is None:
            each.tensor.zero_()  # padding has no other values, and another unit's bytes may lie there
        return True

    def create_done(self, unit: int) -> None:
        """The values are written: they are at home, or on the device."""
        each = self.units[unit]
        each.field.end_write(each.site)
        if each.site is Memory.HOST:
            if each.home > Memory.HOST:
                each.order_behind(each.start_upload())
            each.write_home()
            self._leave_host(each)

    def create_failed(self, unit: int) -> None:
        """Takes the place of `create_done` where the values could not be made: the memory is free again."""
        each = self.units[unit]
        if each.field.state(each.site) is State.WRITING:
            each.field.fail_write(each.site)
            if each.site is Memory.HOST:
                self._leave_host(each)
            elif each.spec.offloaded:
                self._free(each)

    def discard(self, unit: int) -> None:
        """Nobody asks for the unit's values any more: they go without being written."""
        each = self.units[unit]
        self.await_update(unit)
        resident = each.field.state(Memory.DEVICE) is State.VALID
        each.field.consume()
        if resident and each.spec.offloaded:
            self._free(each)

    # Fetch and evict #

    def fetch_start(self, unit: int, priority: Priority, *, updated: bool = False) -> bool:
        """STORED -> FETCHING; False if there is no room now.

        Args:
            updated: an update waits for the values, on the host.
        """
        each = self.units[unit]
        direct = None if self._device is None or updated or len(each.spec.pieces) > 1 else self._device.direct
        if not self.ledger.fits(each.spec.nbytes):
            return False
        if each.home < Memory.HOST and each.site is Memory.DEVICE:
            self._allocate(each)
            each.read(Memory.DEVICE, priority)
        elif each.home is Memory.NVME and direct is not None:
            self._allocate(each)
            each.read_past_host(direct)
        elif each.home is Memory.SHARD:
            self._allocate(each)
            each.put_in_place()
        else:
            if not self._stage(each):
                return False
            self._allocate(each)
            if each.field.state(Memory.HOST) is State.ABSENT:
                each.read(Memory.HOST, priority)
            self.passing[unit] = None
            each.field.pin(Memory.HOST)
            each.field.expect(Memory.DEVICE)
        return True

    def advance(self, unit: int) -> None:
        """Start the next leg of a fetch whose last one is done; the unit is passing and awaits no update."""
        each = self.units[unit]
        if each.field.arriving(Memory.DEVICE) is None:
            read = each.field.arriving(Memory.HOST)
            if read is None or read.done():
                if read is not None:
                    each.field.finish_move(read)
                each.start_upload()

    def fetch_wait(self, unit: int) -> None:
        """FETCHING -> RESIDENT: the values are valid for the compute device.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """
        each = self.units[unit]
        if unit in self.passing:
            self._finish(each, Memory.HOST)
            self.advance(unit)
            upload = each.field.arriving(Memory.DEVICE)
            assert upload is not None
            each.order_behind(upload)
            self._end_fetch(each)
        elif each.home is Memory.SHARD:
            each.await_put()
        else:
            self._finish(each, Memory.DEVICE)
        if each.field.state(Memory.DEVICE) is not State.VALID:
            raise RuntimeError(f"unit {each.spec.name} was to be fetched, but nothing is under way")

    def _finish(self, each: UnitParams, memory: Memory) -> None:
        """Wait for what fills a copy; if it fails, so does the fetch that it belongs to."""
        move = each.field.arriving(memory)
        if move is None:
            return
        try:
            each.wait(move)
        except BaseException:
            if each.field.arriving(memory) is None:  # not a mere interrupt of the wait
                if each.index in self.passing:
                    each.field.give_up(Memory.DEVICE)
                    self._end_fetch(each)
                self._free(each)
            raise

    def _end_fetch(self, each: UnitParams) -> None:
        del self.passing[each.index]
        each.field.unpin(Memory.HOST)
        self._leave_host(each)

    def await_update(self, unit: int) -> None:
        """What the device is given from now on sees the values of the unit's last update."""
        each = self.units[unit]
        upload, each.coming = each.coming, None
        if upload is not None and each.field.arriving(Memory.DEVICE) is upload:  # else it was waited for
            each.order_behind(upload)

    def evict(self, unit: int) -> None:
        """RESIDENT -> STORED."""
        each = self.units[unit]
        self.await_update(unit)
        if not (each.spec.offloaded and each.field.can_drop(Memory.DEVICE)):
            raise RuntimeError(f"unit {each.spec.name} is in use or dirty and cannot be evicted")
        if not each.field.drop(Memory.DEVICE):  # an exception has left a look at it half way
            for move in list(each.field.copies[Memory.DEVICE].moves):
                move.wait(self._counters)
            each.field.gone(Memory.DEVICE)
        self._free(each)

    # Changes #

    def open_host(self, unit: int) -> bool:
        """Start bringing the values to where they are changed, for an update or a look; the unit is FETCHING or
        RESIDENT, and pinned until `close_host`. False if there is no room now."""
        each = self.units[unit]
        if each.site is Memory.HOST:
            if not self._stage(each):
                return False
            if each.field.state(Memory.HOST) is State.ABSENT:
                self._finish(each, each.there)  # it may be on its way past the host
                each.download()
            each.field.pin(Memory.HOST)
        self.pin(unit)
        return True

    def host_wait(self, unit: int) -> None:
        """Wait until `host_tensor` has the values."""
        each = self.units[unit]
        self._finish(each, each.site)

    def note_final(self, unit: int, gradients: Transfer) -> None:
        """Once these gradients have come, nothing but updates changes the unit on the device until `end_pass`."""
        self.units[unit].final = gradients

    def end_pass(self) -> None:
        """The backward pass is over: others may change units from now on."""
        for each in self.units:
            each.final = None

    def begin_change(self, unit: int) -> tuple[Move, ...]:
        """What `host_tensor` shows may be changed once these are over; pairs with `end_change`.

        Raises:
            InfinityError: the values are in files that are not ours to write.
        """
        each = self.units[unit]
        if each.home is Memory.FILE:
            raise InfinityError(
                f"unit `{each.spec.name}` is used where it lies in {each.spec.runs[0].file.path.parent}, which is "
                "never written: to change frozen parameters, read them with in_place=False"
            )
        each.sent = 0
        return each.field.begin_write(each.site)

    def begin_update(self, unit: int) -> tuple[Move, ...]:
        """As `begin_change`, of a unit whose old values nobody may use from now on."""
        if self._device is not None:
            self.units[unit].since = self._device.link.mark()
        return self.begin_change(unit)

    def end_change(self, unit: int) -> None:
        """The values are changed, if `begin_change` was called, and reach the device if the unit is there."""
        each = self.units[unit]
        if each.field.state(each.site) is not State.WRITING:
            return
        with self.handing_over:
            each.field.end_write(each.site)
            if each.home is Memory.SHARD:
                self._send_home(each)
            elif each.site is Memory.HOST and each.field.state(Memory.DEVICE) is not State.ABSENT:
                self._send_up(each)

    def _send_up(self, each: UnitParams) -> None:
        """The newest values are in host memory, and older ones on the device or on their way there."""
        older = each.field.arriving(Memory.DEVICE)
        if older is None and each.index in self.passing:
            return  # the fetch goes on with these
        if older is not None:
            self._finish(each, Memory.DEVICE)
        each.coming = each.start_upload()
        if each.index in self.passing:
            self._end_fetch(each)

    def _send_home(self, each: UnitParams) -> None:
        """The newest values are in host memory, and older ones in the unit's SHARD."""
        for move in list(each.field.copies[Memory.SHARD].moves):
            each.wait(move)
        each.order_behind(each.start_upload())
        self._follow(each)

    def _follow(self, each: UnitParams) -> None:
        """The SHARD has changed: so does what the device has of it in the unit's tensor."""
        if each.field.state(Memory.DEVICE) is not State.ABSENT:
            each.await_put()
            each.put_in_place()
            each.await_put()

    def is_at_hand(self, unit: int) -> bool:
        """An update of the unit may begin: it is where it is updated, or about to be."""
        return self.units[unit].home is Memory.SHARD or self.residency(unit) is not Residency.STORED

    def begin_device_change(self, unit: int) -> torch.Tensor:
        """What is trained of this rank's shard on the device, to be changed by what it is given from now on; pairs with
        `end_device_change`."""
        each = self.units[unit]
        assert self._device is not None
        self.await_update(unit)
        each.final = None
        for move in each.field.begin_write(each.there):
            self._device.link.compute_waits(move.transfer)
        return each.trained_there()

    def end_device_change(self, unit: int) -> None:
        """The change is in the device's queue: what it is given from now on sees it."""
        each = self.units[unit]
        each.field.end_write(each.there, in_order=True)
        if each.home is Memory.SHARD:
            self._follow(each)

    def write_tile(self, unit: int, start: int, numel: int) -> IoFuture | None:
        """See `UnitParams.write`."""
        return self.units[unit].write(start, numel)

    def close_host(self, unit: int) -> None:
        """The values may leave host memory."""
        each = self.units[unit]
        self.end_change(unit)
        if each.site is Memory.HOST:
            each.field.unpin(Memory.HOST)
            self._leave_host(each)
        self.unpin(unit)

    # Changes that are undone #

    def begin_ahead(self) -> None:
        """What is written from now on leaves what is on the drives in the other slots; commits see to it themselves."""
        if not self.keeps_steps:
            self._swap.slots.next_epoch()

    def undo(self, unit: int) -> None:
        """The values are what they were before the last change, of which `can_undo` has told; nothing is on its way.

        What the device has is old from now on, and may be evicted.

        Raises:
            StorageError: they cannot be read again.
        """
        each = self.units[unit]
        self.await_update(unit)
        each.undo()
        if each in self._leaving:
            self._reap()  # or it would stay after all, with values that are undone
        if each.home is Memory.HOST:
            each.wait(each.read(Memory.HOST, Priority.DEMAND))

    # Steps that stay #

    def unwritten(self) -> list[int]:
        """Units whose newest values are to be on the drive and are not."""
        return [
            each.index
            for each in self.units
            if each.written and each.field.version and not each.field.is_newest(Memory.NVME)
        ]

    def close(self) -> None:
        """Give all memory back, once no copy over the link touches it. Nothing else may be in flight."""
        if self._device is not None and self._device.direct is not None:
            self._device.direct.close()
        for each in self.units:
            each.coming = None
            each.close()
        self._spare.clear()

    # Device memory #

    def _allocate(self, each: UnitParams) -> bool:
        """Give the unit's tensor memory, see [Note: stable storage]; False if the budget has no room."""
        if each.spec.offloaded:
            if not self.ledger.fits(each.spec.nbytes):
                return False
            self.ledger.take(each.spec.nbytes, each.spec.name)
        with self._counters.stalled(StallCause.ALLOCATOR):
            each.buffer.allocate()
        if self._device is not None:
            each.since = self._device.link.mark()
        return True

    def _free(self, each: UnitParams) -> None:
        with self._counters.stalled(StallCause.ALLOCATOR):
            each.buffer.free()
        self.ledger.give(each.spec.nbytes)

    # Host memory #

    def _stage(self, each: UnitParams) -> bool:
        """Have memory for a HOST copy, waiting for copies that still touch it; False if updates hold it all."""
        if each.lease is None:
            assert self._device is not None
            staging = self._device.staging
            self._reap()
            each.lease = staging.try_lease(each.spec.shard_nbytes)
            while each.lease is None and self._leaving:
                self._finish_leaving(self._leaving[0])
                each.lease = staging.try_lease(each.spec.shard_nbytes)
        elif each.field.state(Memory.HOST) is State.LEAVING and each.home > Memory.HOST:
            self._finish_leaving(each)  # what is on the device may have changed since
            return self._stage(each)
        elif each.field.state(Memory.HOST) is State.LEAVING:
            each.field.keep(Memory.HOST)  # its values are still there
            self._leaving.remove(each)
        return each.lease is not None

    def _finish_leaving(self, each: UnitParams) -> None:
        """Wait until nothing touches a HOST copy any more that is LEAVING."""
        self._finish(each, each.there)
        for move in list(each.field.copies[Memory.HOST].moves):
            each.wait(move)
        self._reap()

    def _leave_host(self, each: UnitParams) -> None:
        """Give staging memory back that nobody needs any more, as soon as nothing touches it."""
        copy = each.field.copies[Memory.HOST]
        if each.home is Memory.HOST or copy.pins:
            return
        if copy.state is State.ARRIVING:  # whoever wanted it has failed
            self._finish(each, Memory.HOST)
        if copy.state is State.VALID:
            each.field.drop(Memory.HOST)
        if copy.state is State.ABSENT:
            self._release(each)
        elif each not in self._leaving:
            self._leaving.append(each)

    def _reap(self) -> None:
        for each in self._leaving:
            if each.coming is not None and each.coming.done():
                self._finish(each, Memory.DEVICE)
        for each in [each for each in self._leaving if each.field.gone(Memory.HOST)]:
            self._leaving.remove(each)
            self._release(each)

    def _release(self, each: UnitParams) -> None:
        lease, each.lease = each.lease, None
        if lease is not None:
            lease.release()
