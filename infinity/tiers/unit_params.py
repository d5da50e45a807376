"""The parameters of one unit: a field, the memory of its copies, and what carries bytes from one to another.

[Note: uploads]
An upload waits for what still uses the memory that it fills, and not for all that was queued until it begins, since the
host runs ahead of the device: a next forward pass may be queued while an update is computed. Memory that was taken anew
may have been others' until then. What an update changes is used until the update begins: from then on nobody sees the
old values (`UnitViews.outdate`). Each of these moments is marked in the compute stream.

[Note: downloads]
Nor does a download for an update wait for all that was queued until it begins: by then several more units may be. In a
backward pass nothing but updates changes a unit once its gradients are computed, so that it waits for these.

[Note: stable storage]
Autograd saves views of the weights (`weight.t()` for a linear layer) and uses them in backward, after the unit
may have been evicted and fetched again. So a unit's flat tensor keeps one storage for the whole run, and only
the memory behind it comes and goes: pages of a reserved address range on the CPU, a resized storage on a device (as
FSDP2 does). A touch while the unit is away faults; it never reads another unit's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from infinity.io import IoFuture, Priority, Span
from infinity.io.gds import DeviceReads
from infinity.memory import Arena, Lease, SparePages, StableBuffer, stable_memory
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.sharding import WHOLE, Piece, Sharding
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.swap import ALIGN_BYTES, SwapSpace
from infinity.tiers.weight_files import FileRun, WeightFiles

FrozenReader = Callable[[int, int, torch.Tensor], torch.Tensor]

_CPU = torch.device("cpu")
_PART_BYTES = 8 << 20  # a copy of less takes a link hardly longer than being started takes the host


@dataclass(frozen=True)
class FlatSpec:
    """The flat parameter tensor of one unit.

    Attributes:
        name: the unit's name, for messages.
        numel: elements, padded; the first `trainable_numel` of them are trainable.
        dtype: compute dtype.
        offloaded: it comes from its home and goes again; otherwise it is always resident.
        sharding: which slice of it is this rank's; the home and the host have this slice alone.
        runs: the files' blocks that it is an image of; none for a unit of our own.
        beside: its home is on the device, beside what is computed on.
    """

    name: str
    numel: int
    trainable_numel: int
    dtype: torch.dtype
    offloaded: bool
    sharding: Sharding = WHOLE
    runs: tuple[FileRun, ...] = ()
    beside: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that the unit lies in, the outermost first, the one that it is of last."""
        path = self.name.partition(" ")[0]  # what stays in files has more words behind it
        ends = (at for at, letter in enumerate(path) if letter == ".")
        return ("", *(path[:end] for end in ends), path)

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

    def bounds(self, tile_numel: int) -> list[int]:
        """First byte of each range of a shard that is always written whole: what an update changes, and what is frozen;
        then the end of the last."""
        trained = self.trainable_numel // self.sharding.count
        frozen = [trained] if trained < self.shard_numel else []
        starts = [*range(0, trained, tile_numel), *frozen, self.shard_numel]
        return [start * self.dtype.itemsize for start in starts]


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


@dataclass(frozen=True)
class Carriers:
    """What parameters move by.

    Attributes:
        swap: where homes on the drives are.
        files: where those are that somebody else wrote.
        device: None if the compute device is the CPU.
        spare: pages of units that have gone, where that is the CPU.
    """

    swap: SwapSpace
    files: WeightFiles
    device: Device | None
    counters: Counters
    spare: SparePages


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


class UnitParams:
    """One unit's field and the memory of its copies.

    Args:
        extent: of the NVME or the FILE copy.

    Attributes:
        home: where the newest value is whenever the unit is not on the device; DEVICE if it always is.
        site: where it is changed, but for updates on a device.
        there: the copy on the device that such an update changes, and that host memory exchanges values with.
        written: it has an NVME copy, which is written whenever the unit changes.
        lease: of the HOST copy.
        tensor: flat, on the compute device, see [Note: stable storage].
        beside: this rank's shard, if its home is there.
        computed_on: the copy on the compute device.
        coming: the upload of updated values that nothing on the device waits for yet.
        since: what the device was given from this moment on does not touch the memory that the next upload fills, see
            [Note: uploads]; None where nobody knows.
        sent: elements of the shard that are on the device, or on their way there, while the others are being changed.
        final: once this is over the device has the values that a download is to have, see [Note: downloads]; None where
            nobody knows.
    """

    def __init__(
        self,
        index: int,
        spec: FlatSpec,
        home: Memory,
        lease: Lease | None,
        extent: Extent | SlotExtent | None,
        carriers: Carriers,
    ) -> None:
        self.index = index
        self.spec = spec
        self.home = home
        self.site = Memory.DEVICE if carriers.device is None else Memory.HOST
        self.there = Memory.SHARD if home is Memory.SHARD else Memory.DEVICE
        self.written = extent is not None and home is not Memory.FILE
        self.lease = lease
        self.since: Transfer | None = None
        self.sent = 0
        self.final: Transfer | None = None
        self._extent = extent
        self._by = carriers
        self._counters = carriers.counters
        memories = {Memory.DEVICE, home, self.site} | ({Memory.NVME} if self.written else set())
        self.field = Field(f"unit {spec.name}", memories)
        self.computed_on = self.field.copies[Memory.DEVICE]
        self.coming: Move | None = None
        device = _CPU if carriers.device is None else carriers.device.link.device
        self.buffer = stable_memory(spec.nbytes, device, carriers.spare)
        self.buffer.allocate()
        self.tensor = self.buffer.tensor(spec.dtype, spec.numel)
        if spec.offloaded or carriers.device is None:
            self.buffer.free()  # at once, so that the whole model is never there together
        self.beside = self.tensor.new_empty(spec.shard_numel if home is Memory.SHARD else 0)
        if home is Memory.FILE:
            self.field.begin_write(home)  # by whoever wrote the file
            self.field.end_write(home)

    @property
    def device(self) -> Device:
        """Of a unit that has one."""
        assert self._by.device is not None
        return self._by.device

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard where it is changed."""
        return self.tensor if self.lease is None else self.lease.tensor(self.spec.dtype)

    @property
    def residency(self) -> Residency:
        """What compute has of the unit."""
        return Residency.RESIDENT if self.coming is not None else _RESIDENCY[self.computed_on.state]

    def is_dirty(self) -> bool:
        """The newest values are not at home."""
        return not self.field.is_newest(self.home)

    def is_stored(self) -> bool:
        """There is a value, and home has the newest."""
        return self.field.version > 0 and not self.is_dirty()

    def wait(self, move: Move) -> None:
        """Wait until a move is over.

        Raises:
            StorageError: it failed.
        """
        with self._counters.stalled(move.cause):
            self.field.finish_move(move)

    # Drives #

    def span(self, memory: Memory, start: int = 0, numel: int | None = None) -> Span:
        """A range of elements of the shard in host memory, for I/O; by default all of them."""
        source = self.buffer if memory is Memory.DEVICE else self.lease
        assert isinstance(source, (StableBuffer, Lease))
        size = self.spec.dtype.itemsize
        return source.span(start * size, (self.spec.shard_numel if numel is None else numel) * size)

    def _counted(self, read: IoFuture, nbytes: int) -> IoFuture:
        self._counters.moved("nvme_read", nbytes, read, self.index, "parameters")
        return read

    def _read_at(self, span: Span, offset: int, priority: Priority) -> IoFuture:
        """Start reading from this byte of the shard on."""
        assert self._extent is not None
        if self.home is Memory.FILE:
            assert isinstance(self._extent, Extent)
            return self._counted(self._by.files.read(self._extent, span, offset, priority=priority), span.nbytes)
        return self._counted(self._by.swap.read(self._extent, span, offset, priority=priority), span.nbytes)

    def read(self, target: Memory, priority: Priority) -> Move:
        """Start reading the shard from the drives."""
        read = self._read_at(self.span(target), 0, priority)
        source = Memory.NVME if self.written else Memory.FILE
        return self.field.begin_move(source, target, read, StallCause.DISK_READ)

    def read_past_host(self, direct: DeviceReads) -> None:
        """Start reading the shard, one piece, to its place in the tensor on the device."""
        assert self._extent is not None
        (own,) = self.spec.pieces
        target = self.tensor.narrow(0, own.whole, own.numel).view(torch.uint8)
        pieces = self._by.swap.locate(self._extent, self.spec.shard_nbytes)
        read = self._counted(direct.start(pieces, target, self.device.link.mark().result), self.spec.shard_nbytes)
        self.field.begin_move(Memory.NVME, Memory.DEVICE, read, StallCause.DISK_READ)

    def copy_in(self) -> None:
        """Fill `shard`, of a unit with its home elsewhere, from the files that it is an image of."""
        spec = self.spec
        part = self._by.files.add(spec.runs, spec.sharding.rank * spec.shard_nbytes, spec.shard_nbytes)
        self._counted(self._by.files.read(part, self.span(self.site), priority=Priority.DEMAND), part.nbytes).result()

    def write(self, start: int, numel: int) -> IoFuture | None:
        """Start writing a range of `shard` to the drive; None where there is nothing to write to."""
        if not self.written:
            return None
        assert self._extent is not None
        span = self.span(self.site, start, numel)
        write = self._by.swap.write(self._extent, span, start * self.spec.dtype.itemsize)
        self._counters.moved("nvme_write", span.nbytes, write, self.index, "parameters")
        return write

    def write_through(self, writes: Transfer) -> Move | None:
        """The change that is under way is written home piece by piece; None where there is nothing to write to."""
        if not self.written:
            return None
        return self.field.begin_move(self.site, Memory.NVME, writes, StallCause.DISK_WRITE, at=self.field.version + 1)

    def write_home(self) -> None:
        """Write the newest values to the drive, if they have a place there, and wait."""
        write = self.write(0, self.spec.shard_numel)
        if write is not None:
            self.wait(self.field.begin_move(self.site, Memory.NVME, write, StallCause.DISK_WRITE))

    def frozen_reader(self) -> FrozenReader | None:
        """How any thread reads the unit's frozen values where they lie, while training goes on; None if none can.

        Nothing of the unit is brought or kept for it, so whoever changes frozen values lets it come to its end before.

        Returns:
            A function of the shard's first element, of the number of elements, and of memory to read into, which has
            room for them and three blocks more. It returns the values.
        """
        if self.home is Memory.HOST or (self.home is Memory.DEVICE and self.site is Memory.DEVICE):
            return lambda start, numel, _: self.shard[start : start + numel]
        on_drive = isinstance(self._extent, Extent) and self.home < Memory.HOST and self.is_stored()
        if not on_drive or (self.home is Memory.NVME and self._by.swap.verifies):
            return None
        return self._read_apart

    def _read_apart(self, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        assert self._extent is not None
        size = self.spec.dtype.itemsize
        first = start * size // ALIGN_BYTES * ALIGN_BYTES
        end = min(-(-(start + numel) * size // ALIGN_BYTES) * ALIGN_BYTES, self._extent.nbytes)
        begin = -into.data_ptr() % ALIGN_BYTES
        self._read_at(Span(into.data_ptr() + begin, end - first, into), first, Priority.WRITE_BACK).result()
        begin += start * size - first
        return into[begin : begin + numel * size].view(self.spec.dtype)

    # Two slots #

    @property
    def has_slots(self) -> bool:
        """A change of the unit may be undone."""
        return isinstance(self._extent, SlotExtent)

    def can_undo(self) -> bool:
        """A change of the unit that is written home would leave its values as they are now in the other slot."""
        slotted = isinstance(self._extent, SlotExtent) and self._by.swap.slots.keeps(self._extent)
        return slotted and self.home is not Memory.DEVICE and self.field.is_newest(Memory.NVME)

    def can_put_back(self) -> bool:
        """The values may be changed at any time, with nothing to be read or written for it."""
        return self._extent is None and self.home in (Memory.HOST, Memory.DEVICE)

    def undo(self) -> None:
        """The drive has what was there before the last change, and nobody has anything newer; nothing moves."""
        assert isinstance(self._extent, SlotExtent)
        for move in self.field.moves():
            self.wait(move)
        self._by.swap.slots.undo(self._extent)
        self.field.take_back(Memory.NVME)

    def read_found(self) -> None:
        """Fill `shard`, which is held to be changed, with what an earlier process has left on the drive.

        Raises:
            StorageError: it cannot be read.
        """
        assert isinstance(self._extent, SlotExtent)
        bits = next(bits for extent, bits in self._by.swap.slots.found() if extent is self._extent)
        parts = self._extent.parts(bits, self.span(self.site), 0)
        self._counted(self._by.swap.read_parts(parts, Priority.DEMAND), self.spec.shard_nbytes).result()

    # A device with memory of its own #

    def _flat_there(self) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """The memory of the copy `there`, and where the shard's elements lie in it."""
        if self.there is Memory.SHARD:
            return self.beside, (Piece(0, 0, self.spec.shard_numel),)
        return self.tensor, self.spec.pieces

    def trained_there(self) -> torch.Tensor:
        """What is trained of the shard, in the copy `there`."""
        flat, pieces = self._flat_there()
        trained = self.spec.trainable_numel // self.spec.sharding.count
        return flat.narrow(0, pieces[0].whole, trained)

    def put_in_place(self) -> None:
        """SHARD to its place in the tensor, by what the device is given now."""
        self.final = None
        for here, there in _runs(self.beside, self.tensor, self.spec.pieces):
            there.copy_(here)
        self.field.begin_move(Memory.SHARD, Memory.DEVICE, self.device.link.mark(), StallCause.HOST_LINK)

    def await_put(self) -> None:
        """What the device is given from now on sees in the tensor what was put in its place, if anything was."""
        put = self.field.arriving(Memory.DEVICE)
        if put is not None:
            self.order_behind(put)

    def start_upload(self) -> Move:
        """HOST to the device, but for what is there already."""
        token = self.upload(self.spec.shard_numel)
        self.since, self.sent = None, 0
        return self.field.begin_move(Memory.HOST, self.there, token, StallCause.HOST_LINK)

    def upload(self, stop: int) -> Transfer:
        """Start copying what is left of the shard before `stop`."""
        since = None if self.there is Memory.SHARD else self.since  # which is of the tensor
        # On one stream: the last copy's token is good for all.
        for here, there in _runs(self.shard, *self._flat_there(), self.sent, stop):
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self.device.link.upload(there, here, since)
            self.final = None
            self._counters.moved("host_to_device", here.nbytes, token, self.index, "parameters")
        self.sent = stop
        return token

    def can_send_parts(self) -> bool:
        """What is being changed of the unit in host memory can go up piece by piece, see `send_part`."""
        changing = self._by.device is not None and self.field.state(Memory.HOST) is State.WRITING
        # What is on the device is old since the update began, so that nobody minds a mixture there.
        return changing and self.field.state(Memory.DEVICE) is State.VALID

    def send_part(self, stop: int) -> None:
        """The elements of the shard before `stop` are changed: send them up if that is worth a copy; `end_change` sends
        the others."""
        if (stop - self.sent) * self.spec.dtype.itemsize >= _PART_BYTES:
            self.upload(stop)

    def download(self) -> None:
        """The shard's values on the device to HOST."""
        for here, there in _runs(self.shard, *self._flat_there()):
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self.device.link.download(here, there, self.final)
            self._counters.moved("device_to_host", here.nbytes, token, self.index, "parameters")
        self.field.begin_move(self.there, Memory.HOST, token, StallCause.HOST_LINK)

    def order_behind(self, upload: Move) -> None:
        """What the device is given from now on runs behind the upload."""
        with self._counters.stalled(StallCause.HOST_LINK):
            self.device.link.compute_waits(upload.transfer)
        self.field.order_behind(upload)

    def close(self) -> None:
        """Give the memory back, once no copy over the link touches it."""
        for copy in self.field.copies.values():
            for move in copy.moves:
                if move.cause is StallCause.HOST_LINK:
                    move.transfer.result()
            copy.moves.clear()  # they lead back to the copy
        if self.spec.offloaded and self.tensor.numel():
            self.buffer.free()
        # What stays may be read as any tensor, also by whoever keeps a state dict: it goes with the last reference.
        self.tensor = self.beside = self.tensor.new_empty(0)
        self.buffer = stable_memory(0, _CPU)
        self.lease = None


def _runs(
    shard: torch.Tensor, flat: torch.Tensor, pieces: Sequence[Piece], start: int = 0, stop: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Elements [start, stop) of a shard, run by run, and the same ones in a tensor where they lie in these pieces."""
    for piece in pieces:
        first, end = max(start, piece.shard), piece.shard + piece.numel
        end = end if stop is None else min(stop, end)
        if first < end:
            yield shard[first:end], flat.narrow(0, piece.whole + first - piece.shard, end - first)
