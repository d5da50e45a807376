"""Parameters of every unit: a field each, with copies on the compute device, in host memory and in the NVMe tier.

[Note: three placements]
Where the compute device is the CPU, device and host are one memory: a unit is computed on and updated straight in the
buffer that the disk filled, its DEVICE copy. A device with memory of its own has a link; there a unit is updated in its
HOST copy, and what is updated goes up; compute waits for that at the unit's next use (`await_update`). Of a unit that
several ranks share, home and HOST copy are this rank's shard, which has its place in the tensor on the device; the
others' places are filled by an all-gather, which is not this file's business.

A unit whose values nobody changes may have its home in the files that they came in: its FILE copy is read where an
NVME copy would be, and there is nothing to write to (see weight_files.py).

A HOST copy lies in the unit's home lease, or, where the home is elsewhere, in staging memory while a fetch or an update
needs it.

Where every step is to stay on the drives (slots.py), each unit that is not a file's has an NVME copy beside its home:
what an update or anybody else changes is written through to it. Where updates run ahead, units that live on the drive
are written through, too: then what they were before is in the other slot, and nowhere else.

[Note: uploads]
An upload waits for what still uses the memory that it fills, and not for all that was queued until it begins, since the
host runs ahead of the device: a next forward pass may be queued while an update is computed. Memory that was taken anew
may have been others' until then. What an update changes is used until the update begins: from then on nobody sees the
old values (`ParameterViews.outdate`). Each of these moments is marked in the compute stream.

[Note: stable storage]
Autograd saves views of the weights (`weight.t()` for a linear layer) and uses them in backward, after the unit
may have been evicted and fetched again. So a unit's flat tensor keeps one storage for the whole run, and only
the memory behind it comes and goes: pages of a reserved address range on the CPU, a resized storage on a device (as
FSDP2 does). A touch while the unit is away faults; it never reads another unit's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from infinity.errors import InfinityError
from infinity.io import IoFuture, Priority, Span
from infinity.io.gds import DeviceReads
from infinity.memory import Arena, Budget, Lease, StableBuffer, stable_memory
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.sharding import WHOLE, Piece, Sharding
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.swap import ALIGN_BYTES, SwapSpace
from infinity.tiers.weight_files import FileRun, WeightFiles


class Residency(Enum):
    """What compute has of a unit."""

    STORED = auto()
    FETCHING = auto()
    RESIDENT = auto()


_RESIDENCY = {
    State.ABSENT: Residency.STORED,
    State.LEAVING: Residency.STORED,
    State.ARRIVING: Residency.FETCHING,
    State.VALID: Residency.RESIDENT,
    State.WRITING: Residency.RESIDENT,
}


@dataclass(frozen=True)
class FlatSpec:
    """The flat parameter tensor of one unit.

    Attributes:
        name: the unit's name, for messages.
        numel: elements, padded; the first `trainable_numel` of them are trainable.
        dtype: compute dtype.
        offloaded: its home is the tier below; otherwise it is always resident.
        sharding: which slice of it is this rank's; the home and the host have this slice alone.
        runs: the files' blocks that it is an image of; none for a unit of our own.
    """

    name: str
    numel: int
    trainable_numel: int
    dtype: torch.dtype
    offloaded: bool
    sharding: Sharding = WHOLE
    runs: tuple[FileRun, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def shard_numel(self) -> int:
        return self.numel // self.sharding.count

    @property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Where the shard's elements lie in the flat tensor."""
        return self.sharding.pieces(self.trainable_numel, self.numel)


@dataclass(frozen=True)
class Device:
    """A compute device with memory of its own.

    Attributes:
        staging: host memory for copies of units whose home is not there; pinned, for a GPU.
        direct: reads from the swap files into device memory, past the host's; None where there is no such way.
    """

    link: Link
    staging: Arena
    direct: DeviceReads | None = None


FrozenReader = Callable[[int, int, torch.Tensor], torch.Tensor]

_CPU = torch.device("cpu")
_PART_BYTES = 8 << 20  # a copy of less takes a link hardly longer than being started takes the host
_DRIVES = (Memory.FILE, Memory.NVME)


class _Unit:
    """One unit's field and the memory of its copies.

    Attributes:
        home: where the newest value is whenever the unit is not on the device; DEVICE if it always is.
        site: where it is changed.
        written: it has an NVME copy, which is written whenever the unit changes.
        lease: of the HOST copy.
        since: what the device was given from this moment on does not touch the memory that the next upload fills, see
            [Note: uploads]; None where nobody knows.
        extent: of the NVME or the FILE copy.
        sent: elements of the shard that are on the device, or on their way there, while the others are being changed.
    """

    __slots__ = (
        "buffer",
        "extent",
        "field",
        "home",
        "index",
        "lease",
        "sent",
        "since",
        "site",
        "spec",
        "tensor",
        "written",
    )

    def __init__(
        self,
        index: int,
        spec: FlatSpec,
        home: Memory,
        lease: Lease | None,
        extent: Extent | SlotExtent | None,
        device: torch.device | None,
    ) -> None:
        self.index = index
        self.spec = spec
        self.home = home
        self.site = Memory.DEVICE if device is None else Memory.HOST
        self.since: Transfer | None = None
        self.sent = 0
        self.lease = lease
        self.extent = extent
        self.written = extent is not None and home is not Memory.FILE
        memories = {Memory.DEVICE, home, self.site} | ({Memory.NVME} if self.written else set())
        self.field = Field(f"unit {spec.name}", memories)
        self.buffer = stable_memory(spec.nbytes, _CPU if device is None else device)
        self.buffer.allocate()
        self.tensor = self.buffer.tensor(spec.dtype, spec.numel)
        if spec.offloaded or device is None:
            self.buffer.free()  # at once, so that the whole model is never there together
        if home is Memory.FILE:
            self.field.begin_write(home)  # by whoever wrote the file
            self.field.end_write(home)

    def span(self, memory: Memory, start: int, numel: int) -> Span:
        """A range of elements in host memory, for I/O."""
        source = self.buffer if memory is Memory.DEVICE else self.lease
        assert isinstance(source, (StableBuffer, Lease))
        return source.span(start * self.spec.dtype.itemsize, numel * self.spec.dtype.itemsize)


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
        keeps_steps: what changes is always written through, whoever changes it.
        writes_updates: what an update changes is always written, as far as there is a place.
        coming: updated units whose new values are on their way up; nothing on the device waits for them yet.
        passing: units on their way to the device through host memory, oldest first; each has pinned its HOST copy.
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
        self.writes_updates = slotted > 0
        self.specs = tuple(specs)
        self.handing_over = arena.handing_over
        self.coming: dict[int, Move] = {}
        self.passing: dict[int, None] = {}
        self._swap = swap
        self._files = WeightFiles() if files is None else files
        self._budget = budget
        self._counters = counters
        self._device = device
        self._units: list[_Unit] = []
        for index, (spec, home) in enumerate(zip(specs, homes, strict=True)):
            lease = arena.lease(spec.shard_nbytes) if home is Memory.HOST else None
            extent: Extent | SlotExtent | None = None
            if home is Memory.FILE:
                extent = self._files.add(spec.runs, spec.sharding.rank * spec.shard_nbytes, spec.shard_nbytes)
            elif slotted and spec.shard_nbytes and (home is Memory.NVME or (written_through and not spec.runs)):
                extent = swap.reserve_slots(spec.shard_nbytes, _bounds(spec, slotted))
            elif home is Memory.NVME:
                extent = swap.reserve(spec.shard_nbytes)
            self._units.append(_Unit(index, spec, home, lease, extent, None if device is None else device.link.device))
        self._leaving: list[_Unit] = []  # whose staging memory something still touches

    # State #

    def residency(self, unit: int) -> Residency:
        if unit in self.coming:
            return Residency.RESIDENT
        return _RESIDENCY[self._units[unit].field.copies[Memory.DEVICE].state]

    def is_stored(self, unit: int) -> bool:
        """The unit has a value, and its home has the newest."""
        return self._units[unit].field.version > 0 and not self.is_dirty(unit)

    def is_dirty(self, unit: int) -> bool:
        """The newest values are not at home."""
        each = self._units[unit]
        return not each.field.is_newest(each.home)

    def pin(self, unit: int) -> None:
        """Keep the unit from being evicted; pairs with `unpin`."""
        self._units[unit].field.pin(Memory.DEVICE)

    def unpin(self, unit: int) -> None:
        self._units[unit].field.unpin(Memory.DEVICE)

    def keep_pins(self, units: Collection[int]) -> None:
        """One pin on each of these units, and no other: nothing is in use."""
        for index, each in enumerate(self._units):
            each.field.copies[Memory.DEVICE].pins = int(index in units)

    def is_pinned(self, unit: int, times: int = 0) -> bool:
        """The unit is pinned more often than so many times."""
        return self._units[unit].field.copies[Memory.DEVICE].pins > times

    def tensor(self, unit: int) -> torch.Tensor:
        """The flat tensor on the compute device; its memory is valid while the unit is RESIDENT."""
        return self._units[unit].tensor

    def host_tensor(self, unit: int) -> torch.Tensor:
        """This rank's shard where it is changed; valid from `open_host` to `close_host` once `host_wait` is over."""
        each = self._units[unit]
        return each.tensor if each.lease is None else each.lease.tensor(each.spec.dtype)

    # First values #

    def create(self, unit: int) -> bool:
        """Give a unit that has no values memory, to be written through `host_tensor`; False if there is no room."""
        each = self._units[unit]
        if not (self._allocate(each) if each.site is Memory.DEVICE else self._stage(each)):
            return False
        each.field.begin_write(each.site)
        return True

    def copy_in(self, unit: int) -> None:
        """Fill a unit that was created, and has its home elsewhere, from the files that it is an image of."""
        each = self._units[unit]
        part = self._files.add(each.spec.runs, each.spec.sharding.rank * each.spec.shard_nbytes, each.spec.shard_nbytes)
        read = self._files.read(part, each.span(each.site, 0, each.spec.shard_numel), priority=Priority.DEMAND)
        self._counters.moved("nvme_read", part.nbytes, read, unit, "parameters")
        read.result()

    def create_done(self, unit: int) -> None:
        """The values are written: they are at home, or on the device."""
        each = self._units[unit]
        each.field.end_write(each.site)
        if each.site is Memory.HOST:
            if each.home is Memory.DEVICE:
                self._order_behind(each, self._start_upload(each))
            if each.written:
                self.write_home(unit)
            self._leave_host(each)

    def create_failed(self, unit: int) -> None:
        """Takes the place of `create_done` where the values could not be made: the memory is free again."""
        each = self._units[unit]
        if each.field.state(each.site) is State.WRITING:
            each.field.fail_write(each.site)
            if each.site is Memory.HOST:
                self._leave_host(each)
            elif each.spec.offloaded:
                self._free(each)

    def discard(self, unit: int) -> None:
        """Nobody asks for the unit's values any more: they go without being written."""
        each = self._units[unit]
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
        each = self._units[unit]
        direct = None if self._device is None or updated or len(each.spec.pieces) > 1 else self._device.direct
        if not self._budget.fits(each.spec.nbytes):
            return False
        if each.home in _DRIVES and each.site is Memory.DEVICE:
            self._allocate(each)
            self._read(each, Memory.DEVICE, priority)
        elif each.home is Memory.NVME and direct is not None:
            self._allocate(each)
            self._read_past_host(each, direct)
        else:
            if not self._stage(each):
                return False
            self._allocate(each)
            if each.field.state(Memory.HOST) is State.ABSENT:
                self._read(each, Memory.HOST, priority)
            self.passing[unit] = None
            each.field.pin(Memory.HOST)
            each.field.expect(Memory.DEVICE)
        return True

    def advance(self, unit: int) -> None:
        """Start the next leg of a fetch whose last one is done; the unit is passing and awaits no update."""
        each = self._units[unit]
        if each.field.arriving(Memory.DEVICE) is None:
            read = each.field.arriving(Memory.HOST)
            if read is None or read.done():
                if read is not None:
                    each.field.finish_move(read)
                self._start_upload(each)

    def fetch_wait(self, unit: int) -> None:
        """FETCHING -> RESIDENT: the values are valid for the compute device.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """
        each = self._units[unit]
        if unit in self.passing:
            self._finish(each, Memory.HOST)
            self.advance(unit)
            upload = each.field.arriving(Memory.DEVICE)
            assert upload is not None
            self._order_behind(each, upload)
            self._end_fetch(each)
        else:
            self._finish(each, Memory.DEVICE)
        if each.field.state(Memory.DEVICE) is not State.VALID:
            raise RuntimeError(f"unit {each.spec.name} was to be fetched, but nothing is under way")

    def _finish(self, each: _Unit, memory: Memory) -> None:
        """Wait for what fills a copy; if it fails, so does the fetch that it belongs to."""
        move = each.field.arriving(memory)
        if move is None:
            return
        try:
            with self._counters.stalled(move.cause):
                each.field.finish_move(move)
        except BaseException:
            if each.field.arriving(memory) is None:  # not a mere interrupt of the wait
                if each.index in self.passing:
                    each.field.give_up(Memory.DEVICE)
                    self._end_fetch(each)
                self._free(each)
            raise

    def _end_fetch(self, each: _Unit) -> None:
        del self.passing[each.index]
        each.field.unpin(Memory.HOST)
        self._leave_host(each)

    def await_update(self, unit: int) -> None:
        """What the device is given from now on sees the values of the unit's last update."""
        upload, each = self.coming.pop(unit, None), self._units[unit]
        if upload is not None and each.field.arriving(Memory.DEVICE) is upload:  # else it was waited for
            self._order_behind(each, upload)

    def is_evictable(self, unit: int) -> bool:
        each = self._units[unit]
        return each.spec.offloaded and each.field.can_drop(Memory.DEVICE)

    def evict(self, unit: int) -> None:
        """RESIDENT -> STORED; the unit must be evictable."""
        each = self._units[unit]
        self.await_update(unit)
        if not self.is_evictable(unit):
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
        each = self._units[unit]
        if each.site is Memory.HOST:
            if not self._stage(each):
                return False
            if each.field.state(Memory.HOST) is State.ABSENT:
                self._finish(each, Memory.DEVICE)  # it may be on its way past the host
                self._download(each)
            each.field.pin(Memory.HOST)
        self.pin(unit)
        return True

    def host_wait(self, unit: int) -> None:
        """Wait until `host_tensor` has the values."""
        each = self._units[unit]
        self._finish(each, each.site)

    def begin_change(self, unit: int) -> tuple[Move, ...]:
        """What `host_tensor` shows may be changed once these are over; pairs with `end_change`.

        Raises:
            InfinityError: the values are in files that are not ours to write.
        """
        each = self._units[unit]
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
            self._units[unit].since = self._device.link.mark()
        return self.begin_change(unit)

    def write_through(self, unit: int, writes: Transfer) -> Move | None:
        """The change that is under way is written home piece by piece; None where there is nothing to write to."""
        field = self._units[unit].field
        if not self._units[unit].written:
            return None
        site = self._units[unit].site
        return field.begin_move(site, Memory.NVME, writes, StallCause.DISK_WRITE, at=field.version + 1)

    def written(self, unit: int, move: Move) -> None:
        """Wait for what `write_through` has announced."""
        self._units[unit].field.finish_move(move)

    def end_change(self, unit: int) -> None:
        """The values are changed, if `begin_change` was called, and reach the device if the unit is there."""
        each = self._units[unit]
        if each.field.state(each.site) is not State.WRITING:
            return
        with self.handing_over:
            each.field.end_write(each.site)
            if each.site is Memory.HOST and each.field.state(Memory.DEVICE) is not State.ABSENT:
                self._send_up(each)

    def can_send_parts(self, unit: int) -> bool:
        """What is being changed of the unit in host memory can go up piece by piece, see `send_part`."""
        field = self._units[unit].field
        changing = self._device is not None and field.state(Memory.HOST) is State.WRITING
        # What is on the device is old since the update began, so that nobody minds a mixture there.
        return changing and field.state(Memory.DEVICE) is State.VALID

    def send_part(self, unit: int, stop: int) -> None:
        """The elements of the shard before `stop` are changed: send them up if that is worth a copy; `end_change` sends
        the others."""
        each = self._units[unit]
        if (stop - each.sent) * each.spec.dtype.itemsize >= _PART_BYTES:
            self._upload(each, stop)

    def _send_up(self, each: _Unit) -> None:
        """The newest values are in host memory, and older ones on the device or on their way there."""
        older = each.field.arriving(Memory.DEVICE)
        if older is None and each.index in self.passing:
            return  # the fetch goes on with these
        if older is not None:
            self._finish(each, Memory.DEVICE)
        self.coming[each.index] = self._start_upload(each)
        if each.index in self.passing:
            self._end_fetch(each)

    def begin_device_change(self, unit: int) -> torch.Tensor:
        """What is trained of this rank's shard on the device, to be changed by what it is given from now on; pairs with
        `end_device_change`."""
        each = self._units[unit]
        assert self._device is not None
        self.await_update(unit)
        for move in each.field.begin_write(Memory.DEVICE):
            self._device.link.compute_waits(move.transfer)
        sharding, trained = each.spec.sharding, each.spec.trainable_numel // each.spec.sharding.count
        return each.tensor.narrow(0, sharding.rank * trained, trained)

    def end_device_change(self, unit: int) -> None:
        """The change is in the device's queue: what it is given from now on sees it."""
        self._units[unit].field.end_write(Memory.DEVICE)

    def close_host(self, unit: int) -> None:
        """The values may leave host memory."""
        each = self._units[unit]
        self.end_change(unit)
        if each.site is Memory.HOST:
            each.field.unpin(Memory.HOST)
            self._leave_host(each)
        self.unpin(unit)

    def write_home(self, unit: int) -> None:
        """Write the newest values home and wait."""
        each = self._units[unit]
        write = self.write_tile(unit, 0, each.spec.shard_numel)
        if write is not None:
            move = each.field.begin_move(each.site, Memory.NVME, write, StallCause.DISK_WRITE)
            with self._counters.stalled(move.cause):
                each.field.finish_move(move)

    def write_tile(self, unit: int, start: int, numel: int) -> IoFuture | None:
        """Write a range of `host_tensor` to the drive; None where there is nothing to write to."""
        each = self._units[unit]
        if not each.written:
            return None
        assert each.extent is not None
        span = each.span(each.site, start, numel)
        write = self._swap.write(each.extent, span, start * each.spec.dtype.itemsize)
        self._counters.moved("nvme_write", span.nbytes, write, unit, "parameters")
        return write

    # Values that nobody changes #

    def frozen_reader(self, unit: int) -> FrozenReader | None:
        """How any thread reads the unit's frozen values where they lie, while training goes on; None if none can.

        Nothing of the unit is brought or kept for it, so whoever changes frozen values lets it come to its end before.

        Returns:
            A function of the shard's first element, of the number of elements, and of memory to read into, which has
            room for them and three blocks more. It returns the values.
        """
        each = self._units[unit]
        if each.home is Memory.HOST or (each.home is Memory.DEVICE and each.site is Memory.DEVICE):
            return lambda start, numel, _: self.host_tensor(unit)[start : start + numel]
        on_drive = isinstance(each.extent, Extent) and each.home in _DRIVES and self.is_stored(unit)
        if not on_drive or (each.home is Memory.NVME and self._swap.verifies):
            return None
        return lambda start, numel, into: self._read_apart(each, start, numel, into)

    def _read_apart(self, each: _Unit, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        assert isinstance(each.extent, Extent)
        size = each.spec.dtype.itemsize
        first = start * size // ALIGN_BYTES * ALIGN_BYTES
        end = min(-(-(start + numel) * size // ALIGN_BYTES) * ALIGN_BYTES, each.extent.nbytes)
        begin = -into.data_ptr() % ALIGN_BYTES
        span = Span(into.data_ptr() + begin, end - first, into)
        source = self._files if each.home is Memory.FILE else self._swap
        read = source.read(each.extent, span, first, priority=Priority.WRITE_BACK)
        self._counters.moved("nvme_read", span.nbytes, read, each.index, "parameters")
        read.result()
        begin += start * size - first
        return into[begin : begin + numel * size].view(each.spec.dtype)

    # Changes that are undone #

    def begin_ahead(self) -> None:
        """What is written from now on leaves what is on the drives in the other slots; commits see to it themselves."""
        if not self.keeps_steps:
            self._swap.slots.next_epoch()

    @property
    def has_slots(self) -> bool:
        """Changes of some units can be undone."""
        return any(isinstance(each.extent, SlotExtent) for each in self._units)

    def can_undo(self, unit: int) -> bool:
        """A change of the unit that is written home would leave its values as they are now in the other slot."""
        each = self._units[unit]
        slotted = isinstance(each.extent, SlotExtent) and self._swap.slots.keeps(each.extent)
        return slotted and each.home is not Memory.DEVICE and each.field.is_newest(Memory.NVME)

    def can_put_back(self, unit: int) -> bool:
        """The values may be changed at any time, with nothing to be read or written for it."""
        each = self._units[unit]
        return each.extent is None and each.home in (Memory.HOST, Memory.DEVICE)

    def undo(self, unit: int) -> None:
        """The values are what they were before the last change, of which `can_undo` has told; nothing is on its way.

        What the device has is old from now on, and may be evicted.

        Raises:
            StorageError: they cannot be read again.
        """
        each = self._units[unit]
        assert isinstance(each.extent, SlotExtent)
        self.await_update(unit)
        for move in each.field.moves():
            with self._counters.stalled(move.cause):
                each.field.finish_move(move)
        self._swap.slots.undo(each.extent)
        each.field.take_back(Memory.NVME)
        if each in self._leaving:
            self._reap()  # or it would stay after all, with values that are undone
        if each.home is Memory.HOST:
            read = self._swap.read(
                each.extent, each.span(Memory.HOST, 0, each.spec.shard_numel), priority=Priority.DEMAND
            )
            self._counters.moved("nvme_read", each.spec.shard_nbytes, read, unit, "parameters")
            move = each.field.begin_move(Memory.NVME, Memory.HOST, read, StallCause.DISK_READ)
            with self._counters.stalled(move.cause):
                each.field.finish_move(move)

    # Steps that stay #

    def unwritten(self) -> list[int]:
        """Units whose newest values are to be on the drive and are not."""
        return [
            each.index
            for each in self._units
            if each.written and each.field.version and not each.field.is_newest(Memory.NVME)
        ]

    def has_found(self, unit: int) -> bool:
        """An earlier process has left the unit's values; not where they are in somebody's files."""
        return self._units[unit].written

    def read_found(self, unit: int) -> None:
        """Fill `host_tensor`, which is held to be changed, with what an earlier process has left on the drive.

        Raises:
            StorageError: it cannot be read.
        """
        each = self._units[unit]
        assert isinstance(each.extent, SlotExtent)
        bits = next(bits for extent, bits in self._swap.slots.found() if extent is each.extent)
        parts = each.extent.parts(bits, each.span(each.site, 0, each.spec.shard_numel), 0)
        read = self._swap.read_parts(parts, Priority.DEMAND)
        self._counters.moved("nvme_read", each.spec.shard_nbytes, read, unit, "parameters")
        read.result()

    def close(self) -> None:
        """Give all memory back, once no copy over the link touches it. Nothing else may be in flight."""
        if self._device is not None and self._device.direct is not None:
            self._device.direct.close()
        self.coming.clear()
        for each in self._units:
            for copy in each.field.copies.values():
                for move in copy.moves:
                    if move.cause is StallCause.HOST_LINK:
                        move.transfer.result()
                copy.moves.clear()  # they lead back to the copy
            if each.spec.offloaded and each.tensor.numel():
                each.buffer.free()
            # What stays may be read as any tensor, also by whoever keeps a state dict: it goes with the last reference.
            each.tensor = each.tensor.new_empty(0)
            each.buffer = stable_memory(0, _CPU)
            each.lease = None

    # Device memory #

    def _allocate(self, each: _Unit) -> bool:
        """Give the unit's tensor memory, see [Note: stable storage]; False if the budget has no room."""
        if each.spec.offloaded:
            if not self._budget.fits(each.spec.nbytes):
                return False
            self._budget.take(each.spec.nbytes, each.spec.name)
        with self._counters.stalled(StallCause.ALLOCATOR):
            each.buffer.allocate()
        if self._device is not None:
            each.since = self._device.link.mark()
        return True

    def _free(self, each: _Unit) -> None:
        with self._counters.stalled(StallCause.ALLOCATOR):
            each.buffer.free()
        self._budget.give(each.spec.nbytes)

    # Host memory #

    def _stage(self, each: _Unit) -> bool:
        """Have memory for a HOST copy, waiting for copies that still touch it; False if updates hold it all."""
        if each.lease is None:
            assert self._device is not None
            staging = self._device.staging
            self._reap()
            each.lease = staging.try_lease(each.spec.shard_nbytes)
            while each.lease is None and self._leaving:
                self._finish_leaving(self._leaving[0])
                each.lease = staging.try_lease(each.spec.shard_nbytes)
        elif each.field.state(Memory.HOST) is State.LEAVING and each.home is Memory.DEVICE:
            self._finish_leaving(each)  # the user may have written to what is on the device since
            return self._stage(each)
        elif each.field.state(Memory.HOST) is State.LEAVING:
            each.field.keep(Memory.HOST)  # its values are still there
            self._leaving.remove(each)
        return each.lease is not None

    def _finish_leaving(self, each: _Unit) -> None:
        """Wait until nothing touches a HOST copy any more that is LEAVING."""
        self._finish(each, Memory.DEVICE)
        for move in list(each.field.copies[Memory.HOST].moves):
            with self._counters.stalled(move.cause):
                each.field.finish_move(move)
        self._reap()

    def _leave_host(self, each: _Unit) -> None:
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
            upload = self.coming.get(each.index)
            if upload is not None and upload.done():
                self._finish(each, Memory.DEVICE)
        for each in [each for each in self._leaving if each.field.gone(Memory.HOST)]:
            self._leaving.remove(each)
            self._release(each)

    def _release(self, each: _Unit) -> None:
        lease, each.lease = each.lease, None
        if lease is not None:
            lease.release()

    # Moves #

    def _read(self, each: _Unit, target: Memory, priority: Priority) -> None:
        assert each.extent is not None
        span = each.span(target, 0, each.spec.shard_numel)
        if each.home is Memory.FILE:
            assert isinstance(each.extent, Extent)
            read = self._files.read(each.extent, span, priority=priority)
        else:
            read = self._swap.read(each.extent, span, priority=priority)
        each.field.begin_move(each.home, target, read, StallCause.DISK_READ)
        self._counters.moved("nvme_read", each.spec.shard_nbytes, read, each.index, "parameters")

    def _read_past_host(self, each: _Unit, direct: DeviceReads) -> None:
        assert self._device is not None
        assert each.extent is not None
        (own,) = each.spec.pieces
        target = each.tensor.narrow(0, own.whole, own.numel).view(torch.uint8)
        pieces = self._swap.locate(each.extent, each.spec.shard_nbytes)
        read = direct.start(pieces, target, self._device.link.mark().result)
        each.field.begin_move(Memory.NVME, Memory.DEVICE, read, StallCause.DISK_READ)
        self._counters.moved("nvme_read", each.spec.shard_nbytes, read, each.index, "parameters")

    def _start_upload(self, each: _Unit) -> Move:
        """HOST to the shard's place in the tensor on the device, but for what is there already."""
        token = self._upload(each, each.spec.shard_numel)
        each.since, each.sent = None, 0
        return each.field.begin_move(Memory.HOST, Memory.DEVICE, token, StallCause.HOST_LINK)

    def _upload(self, each: _Unit, stop: int) -> Transfer:
        """Start copying what is left of the shard before `stop`."""
        assert self._device is not None
        source = self.host_tensor(each.index)
        for piece in each.spec.pieces:  # on one stream: the last copy's token is good for all
            start, end = max(each.sent, piece.shard), min(stop, piece.shard + piece.numel)
            if start >= end:
                continue
            left = Piece(start, piece.whole + start - piece.shard, end - start)
            here, there = _shard_part(source, left), _whole_part(each.tensor, left)
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self._device.link.upload(there, here, each.since)
            self._counters.moved("host_to_device", here.nbytes, token, each.index, "parameters")
        each.sent = stop
        return token

    def _download(self, each: _Unit) -> None:
        """The shard's place in the tensor on the device to HOST."""
        assert self._device is not None
        target = self.host_tensor(each.index)
        for piece in each.spec.pieces:
            here, there = _shard_part(target, piece), _whole_part(each.tensor, piece)
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self._device.link.download(here, there)
            self._counters.moved("device_to_host", here.nbytes, token, each.index, "parameters")
        each.field.begin_move(Memory.DEVICE, Memory.HOST, token, StallCause.HOST_LINK)

    def _order_behind(self, each: _Unit, upload: Move) -> None:
        assert self._device is not None
        with self._counters.stalled(StallCause.HOST_LINK):
            self._device.link.compute_waits(upload.transfer)
        each.field.order_behind(upload)


def _bounds(spec: FlatSpec, tile_numel: int) -> list[int]:
    """First byte of each range of a shard that is always written whole: what an update changes, and what is frozen."""
    trained = spec.trainable_numel // spec.sharding.count
    starts = [*range(0, trained, tile_numel), *([trained] if trained < spec.shard_numel else []), spec.shard_numel]
    return [start * spec.dtype.itemsize for start in starts]


def _shard_part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor[piece.shard : piece.shard + piece.numel]


def _whole_part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    return tensor[piece.whole : piece.whole + piece.numel]
