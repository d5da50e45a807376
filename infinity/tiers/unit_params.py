"""The parameters of one unit: a field, the memory of its copies, and the transfers between them.

[Note: uploads]
An upload waits only for work that still uses its target memory. It does not wait for all queued work, because the host
runs ahead of the device: the next forward pass may be queued during an update. There are two cases. Newly allocated
memory may have had another use until its allocation. A unit that is updated is in use until the update begins; after
that, the model does not see its old values (`UnitViews.mark_stale`). The moment of the allocation, or of the begin, is
marked in the compute stream, and the upload waits for the mark.

[Note: downloads]
For the same reason, a download for an update does not wait for all queued work. In a backward pass, nothing but an
update changes a unit after its gradients are computed, so the download waits for the gradients.

[Note: stable storage]
Autograd saves views of the weights (`weight.t()` for a linear layer) and uses them in backward. By then, the unit may
have been evicted and fetched again. So a unit's flat tensor keeps one storage for the whole run, and only the memory
behind it is freed and allocated: pages of a reserved address range on the CPU, a resized storage on a device (as in
FSDP2). An access while the unit is evicted faults; it never reads another unit's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from infinity.io import IoFuture, Priority, Span
from infinity.io.gds import DeviceReads
from infinity.memory import ALIGN_BYTES, Arena, Lease, SparePages, StableBuffer, aligned, stable_memory
from infinity.telemetry import Counters, StallCause
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.sharding import WHOLE, Piece, Sharding
from infinity.tiers.slots import Extent, SlotExtent
from infinity.tiers.swap import SwapSpace
from infinity.tiers.weight_files import FileRun, WeightFiles

FrozenReader = Callable[[int, int, torch.Tensor], torch.Tensor]

_CPU = torch.device("cpu")
_PART_BYTES = 8 << 20  # for less, the launch of a copy takes as long as the copy


@dataclass(frozen=True)
class FlatSpec:
    """The flat parameter tensor of one unit.

    Attributes:
        name: the unit's name, for messages.
        numel: elements, padded; the first `trainable_numel` of them are trainable.
        dtype: compute dtype.
        offloaded: the unit is fetched from its home and evicted; if False it is always resident.
        sharding: this rank's slice of the tensor; the home and the host hold this slice alone.
        runs: the blocks of files whose image the tensor is; empty for a unit that is not in files.
        has_device_shard: whether the home is on the device, in addition to the unsharded tensor.
    """

    name: str
    numel: int
    trainable_numel: int
    dtype: torch.dtype
    offloaded: bool
    sharding: Sharding = WHOLE
    runs: tuple[FileRun, ...] = ()
    has_device_shard: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that contain the unit, the outermost first, its own module last."""
        path = self.name.partition(" ")[0]  # a unit in files has more words after its path
        ends = (at for at, letter in enumerate(path) if letter == ".")
        return ("", *(path[:end] for end in ends), path)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def moving_bytes(self) -> int:
        """Bytes of the whole unit; 0 if it is never evicted."""
        return self.nbytes if self.offloaded else 0

    @cached_property
    def shard_numel(self) -> int:
        return self.numel // self.sharding.count

    @cached_property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The shard's ranges in the flat tensor."""
        return self.sharding.pieces(self.trainable_numel, self.numel)

    def bounds(self, tile_numel: int) -> list[int]:
        """Return the first byte of each range that is always written whole (tiles, frozen part), then the end."""
        trained = self.trainable_numel // self.sharding.count
        frozen = [trained] if trained < self.shard_numel else []
        starts = [*range(0, trained, tile_numel), *frozen, self.shard_numel]
        return [start * self.dtype.itemsize for start in starts]


@dataclass(frozen=True)
class Device:
    """A memory that units are computed in, apart from the memory that updates change.

    It belongs to a device with its own memory, or to the CPU if several ranks share units: a rank updates its shard,
    and computes with whole units.

    Attributes:
        link: copies between the two memories; on the CPU within host memory.
        staging: host memory for copies of units whose home is another memory; pinned, for a GPU.
        direct: reads from the swap files straight into device memory; None if this is not possible.
    """

    link: Link
    staging: Arena
    direct: DeviceReads | None = None


@dataclass(frozen=True)
class Carriers:
    """The objects that transfer parameters.

    Attributes:
        swap: space of homes on NVMe.
        files: existing files that contain homes.
        device: None if the model computes on the memory that updates change (a CPU, and one rank for each unit).
        spare: pages of evicted units, if the model computes in host memory.
    """

    swap: SwapSpace
    files: WeightFiles
    device: Device | None
    counters: Counters
    spare: SparePages


class UnitParams:
    """One unit's field and the memory of its copies.

    Args:
        extent: of the NVME or the FILE copy.

    Attributes:
        home: the memory with the newest value while the unit is not on the device; DEVICE if it always is.
        keeps_shard: whether the home is SHARD: this rank's shard is always on the device, and updates change it.
        update_memory: the memory in which the unit is changed, except by updates on a device.
        device_copy: the copy on the device, DEVICE or SHARD, that is uploaded, downloaded, and changed by updates on
            the device.
        has_nvme_copy: whether there is an NVME copy, which is written whenever the unit changes.
        lease: of the HOST copy.
        tensor: flat, on the compute device, see [Note: stable storage].
        device_shard: this rank's shard, if the unit keeps it; else empty.
        compute_copy: the copy on the compute device; while it is pinned, the unit is not evicted.
        update_upload: the upload of updated values, as long as the compute stream is not ordered behind it.
        upload_after: a mark in the compute stream: work queued after it does not touch the memory that the next upload
            fills, see [Note: uploads]. None if unknown.
        uploaded: elements of the shard that are uploaded or on their way, while later elements are still being changed.
        download_after: a mark in the compute stream: the values can be downloaded once it has passed, see
            [Note: downloads]. None if unknown.
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
        self.update_memory = Memory.DEVICE if carriers.device is None else Memory.HOST
        self.keeps_shard = home is Memory.SHARD
        self.device_copy = Memory.SHARD if self.keeps_shard else Memory.DEVICE
        self.has_nvme_copy = extent is not None and home is not Memory.FILE
        self.lease = lease
        self.upload_after: Transfer | None = None
        self.uploaded = 0
        self.download_after: Transfer | None = None
        self._extent = extent
        self._carriers = carriers
        self._counters = carriers.counters
        memories = {Memory.DEVICE, home, self.update_memory} | ({Memory.NVME} if self.has_nvme_copy else set())
        self.field = Field(f"unit {spec.name}", memories)
        self.compute_copy = self.field.copies[Memory.DEVICE]
        self.update_upload: Move | None = None
        device = _CPU if carriers.device is None else carriers.device.link.device
        self.buffer = stable_memory(spec.nbytes, device, carriers.spare)
        self.buffer.allocate()
        self.tensor = self.buffer.tensor(spec.dtype, spec.numel)
        if spec.offloaded or carriers.device is None:
            self.buffer.free()  # before the next unit is allocated: the whole model may not fit in memory
        self.device_shard = self.tensor.new_empty(spec.shard_numel if self.keeps_shard else 0)
        if home is Memory.FILE:
            self.field.begin_write(home)  # the file has the first value, although this process did not write it
            self.field.end_write(home)

    @property
    def device(self) -> Device:
        """The compute memory; it must be another one than that of updates."""
        assert self._carriers.device is not None
        return self._carriers.device

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard, in the memory in which it is changed.

        Between `Params.open_host` and `close_host` it may be changed, once `Params.host_wait` has returned.
        """
        return self.tensor if self.lease is None else self.lease.tensor(self.spec.dtype)

    def is_dirty(self) -> bool:
        """Whether the home does not have the newest values."""
        return not self.field.is_newest(self.home)

    def is_nvme_stale(self) -> bool:
        """Whether the NVME copy that the unit should have is not the newest."""
        return self.has_nvme_copy and self.field.version > 0 and not self.field.is_newest(Memory.NVME)

    def is_stored(self) -> bool:
        """Whether the unit has a value, and its home has the newest one."""
        return self.field.version > 0 and not self.is_dirty()

    def wait(self, move: Move) -> None:
        """Block until a move ends.

        Raises:
            StorageError: it failed.
        """
        with self._counters.stalled(move.cause):
            self.field.finish_move(move)

    # NVMe and files #

    def span(self, memory: Memory, start: int = 0, numel: int | None = None) -> Span:
        """Return a range of elements of the shard in host memory, for I/O; by default all of them."""
        source = self.buffer if memory is Memory.DEVICE else self.lease
        assert isinstance(source, (StableBuffer, Lease))
        size = self.spec.dtype.itemsize
        return source.span(start * size, (self.spec.shard_numel if numel is None else numel) * size)

    def _counted(self, read: IoFuture, nbytes: int) -> IoFuture:
        self._counters.moved("nvme_read", nbytes, read, self.index, "parameters")
        return read

    def _read_at(self, span: Span, offset: int, priority: Priority) -> IoFuture:
        """Start reading, from this byte of the shard on."""
        assert self._extent is not None
        if self.home is Memory.FILE:
            assert isinstance(self._extent, Extent)
            return self._counted(self._carriers.files.read(self._extent, span, offset, priority=priority), span.nbytes)
        return self._counted(self._carriers.swap.read(self._extent, span, offset, priority=priority), span.nbytes)

    def read(self, target: Memory, priority: Priority) -> Move:
        """Start reading the shard from its NVME or FILE copy."""
        read = self._read_at(self.span(target), 0, priority)
        source = Memory.NVME if self.has_nvme_copy else Memory.FILE
        return self.field.begin_move(source, target, read, StallCause.DISK_READ)

    def read_past_host(self, direct: DeviceReads) -> None:
        """Start reading the shard, which is one piece, straight to its place in the tensor on the device."""
        assert self._extent is not None
        (own,) = self.spec.pieces
        target = self.tensor.narrow(0, own.whole, own.numel).view(torch.uint8)
        pieces = self._carriers.swap.locate(self._extent, self.spec.shard_nbytes)
        read = self._counted(direct.start(pieces, target, self.device.link.mark().result), self.spec.shard_nbytes)
        self.field.begin_move(Memory.NVME, Memory.DEVICE, read, StallCause.DISK_READ)

    def read_image(self) -> None:
        """Fill `shard` from the files whose image it is. The unit has its home in another memory."""
        spec = self.spec
        part = self._carriers.files.add(spec.runs, spec.sharding.rank * spec.shard_nbytes, spec.shard_nbytes)
        read = self._carriers.files.read(part, self.span(self.update_memory), priority=Priority.DEMAND)
        self._counted(read, part.nbytes).result()

    def write(self, start: int, numel: int) -> IoFuture | None:
        """Start writing a range of `shard` to the NVME copy. Return None if the unit has none."""
        if not self.has_nvme_copy:
            return None
        assert self._extent is not None
        span = self.span(self.update_memory, start, numel)
        write = self._carriers.swap.write(self._extent, span, start * self.spec.dtype.itemsize)
        self._counters.moved("nvme_write", span.nbytes, write, self.index, "parameters")
        return write

    def write_through(self, writes: Transfer) -> Move | None:
        """Start the move of a change in progress that is written tile by tile. Return None without an NVME copy."""
        if not self.has_nvme_copy:
            return None
        return self.field.begin_move(
            self.update_memory, Memory.NVME, writes, StallCause.DISK_WRITE, at=self.field.version + 1
        )

    def write_home(self) -> None:
        """Write the newest values to the NVME copy, if the unit has one, and block until they are written."""
        begun = self.field.arriving(Memory.NVME) if self.has_nvme_copy else None
        if begun is not None:  # an interrupt has ended the wait for it
            self.wait(begun)
        if self.is_nvme_stale() and (write := self.write(0, self.spec.shard_numel)) is not None:
            self.wait(self.field.begin_move(self.update_memory, Memory.NVME, write, StallCause.DISK_WRITE))

    def frozen_reader(self) -> FrozenReader | None:
        """Return a function with which any thread can read frozen values during training; None if this is not possible.

        The function neither fetches nor pins the unit: end its use before frozen values change.

        Returns:
            A function of the shard's first element, the number of elements, and memory to read into, with room for
            these elements and three blocks more. It returns the values.
        """
        if self.home is Memory.HOST or (self.home is Memory.DEVICE and self.update_memory is Memory.DEVICE):
            return lambda start, numel, _: self.shard[start : start + numel]
        on_drive = isinstance(self._extent, Extent) and self.home < Memory.HOST and self.is_stored()
        if not on_drive or (self.home is Memory.NVME and self._carriers.swap.verifies):
            return None
        return self._read_frozen

    def _read_frozen(self, start: int, numel: int, into: torch.Tensor) -> torch.Tensor:
        assert self._extent is not None
        size = self.spec.dtype.itemsize
        first = start * size // ALIGN_BYTES * ALIGN_BYTES
        end = min(aligned((start + numel) * size), self._extent.nbytes)
        begin = -into.data_ptr() % ALIGN_BYTES
        self._read_at(Span(into.data_ptr() + begin, end - first, into), first, Priority.WRITE_BACK).result()
        begin += start * size - first
        return into[begin : begin + numel * size].view(self.spec.dtype)

    # Double-buffered units #

    @property
    def is_double_buffered(self) -> bool:
        """Whether the unit is double-buffered, so that a change can be rolled back."""
        return isinstance(self._extent, SlotExtent)

    def can_roll_back(self) -> bool:
        """Whether a change that is written to NVMe would keep the present values in the other slot."""
        keeps = isinstance(self._extent, SlotExtent) and self._carriers.swap.slots.keeps(self._extent)
        return keeps and self.home is not Memory.DEVICE and self.field.is_newest(Memory.NVME)

    def is_in_memory_alone(self) -> bool:
        """Whether the values can be changed at any time without reading or writing a file."""
        return self._extent is None and self.home in (Memory.HOST, Memory.DEVICE)

    def roll_back(self) -> None:
        """Make the version before the last change the newest, in its slot on NVMe; no bytes move."""
        assert isinstance(self._extent, SlotExtent)
        for move in self.field.moves():
            self.wait(move)
        self._carriers.swap.slots.roll_back(self._extent)
        self.field.roll_back(Memory.NVME)

    def read_found(self) -> None:
        """Fill `shard`, during a change of it, with the values that an earlier process left on NVMe.

        Raises:
            StorageError: they cannot be read.
        """
        assert isinstance(self._extent, SlotExtent)
        parts = self._extent.parts(self._extent.found, self.span(self.update_memory), 0)
        self._counted(self._carriers.swap.read_parts(parts, Priority.DEMAND), self.spec.shard_nbytes).result()

    # A compute memory apart from that of updates #

    def _device_flat(self) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """Return the memory of the `device_copy`, and the shard's ranges in it."""
        if self.keeps_shard:
            return self.device_shard, (Piece(0, 0, self.spec.shard_numel),)
        return self.tensor, self.spec.pieces

    def trained_on_device(self) -> torch.Tensor:
        """Return the trainable part of the shard, in the `device_copy`."""
        flat, pieces = self._device_flat()
        trained = self.spec.trainable_numel // self.spec.sharding.count
        return flat.narrow(0, pieces[0].whole, trained)

    def copy_shard_to_tensor(self) -> None:
        """Copy the SHARD to its place in the tensor, in compute-stream order."""
        self.download_after = None
        for here, there in _runs(self.device_shard, self.tensor, self.spec.pieces):
            there.copy_(here)
        self.field.begin_move(Memory.SHARD, Memory.DEVICE, self.device.link.mark(), StallCause.HOST_LINK)

    def await_shard_copy(self) -> None:
        """Order all later work of the compute stream behind `copy_shard_to_tensor`, if it was called."""
        put = self.field.arriving(Memory.DEVICE)
        if put is not None:
            self.order_behind(put)

    def start_upload(self) -> Move:
        """Start uploading the parts of the HOST copy that were not sent yet."""
        token = self.upload(self.spec.shard_numel)
        self.upload_after, self.uploaded = None, 0
        return self.field.begin_move(Memory.HOST, self.device_copy, token, StallCause.HOST_LINK)

    def upload(self, stop: int) -> Transfer:
        """Start copying the elements of the shard before `stop` that were not sent yet."""
        after = None if self.keeps_shard else self.upload_after  # the mark refers to the tensor
        # All copies are on one stream: the last token covers all of them.
        for here, there in _runs(self.shard, *self._device_flat(), self.uploaded, stop):
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self.device.link.upload(there, here, after)
            self.download_after = None
            self._counters.moved("host_to_device", here.nbytes, token, self.index, "parameters")
        self.uploaded = stop
        return token

    def can_upload_parts(self) -> bool:
        """Whether changed elements can be uploaded while the HOST copy is still being changed, see `upload_part`."""
        changing = self._carriers.device is not None and self.field.state(Memory.HOST) is State.WRITING
        # The copy on the device is stale since the update began. No code reads it, so it may mix old and new values.
        return changing and self.field.state(Memory.DEVICE) is State.VALID

    def upload_part(self, stop: int) -> None:
        """Upload changed elements before `stop` if they are worth a copy; `end_change` sends the others."""
        if (stop - self.uploaded) * self.spec.dtype.itemsize >= _PART_BYTES:
            self.upload(stop)

    def download(self) -> None:
        """Start copying the shard from the device to the HOST copy."""
        for here, there in _runs(self.shard, *self._device_flat()):
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self.device.link.download(here, there, self.download_after)
            self._counters.moved("device_to_host", here.nbytes, token, self.index, "parameters")
        self.field.begin_move(self.device_copy, Memory.HOST, token, StallCause.HOST_LINK)

    def order_behind(self, upload: Move) -> None:
        """Order all later work of the compute stream behind the upload."""
        with self._counters.stalled(StallCause.HOST_LINK):
            self.device.link.compute_waits(upload.transfer)
        self.field.order_behind(upload)

    def close(self) -> None:
        """Free the memory, once no copy over the link touches it."""
        for copy in self.field.copies.values():
            for move in copy.moves:
                if move.cause is StallCause.HOST_LINK:
                    move.transfer.result()
            copy.moves.clear()  # they refer to the copy: a cycle
        if self.spec.offloaded and self.tensor.numel():
            self.buffer.free()
        # A resident tensor can still be in use, such as in a state dict: the last reference frees it.
        self.tensor = self.device_shard = self.tensor.new_empty(0)
        self.buffer = stable_memory(0, _CPU)
        self.lease = None


def _runs(
    shard: torch.Tensor, flat: torch.Tensor, pieces: Sequence[Piece], start: int = 0, stop: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield elements [start, stop) of a shard, run by run, each with its place in a tensor with these pieces."""
    for piece in pieces:
        first, end = max(start, piece.shard), piece.shard + piece.numel
        end = end if stop is None else min(stop, end)
        if first < end:
            yield shard[first:end], flat.narrow(0, piece.whole + first - piece.shard, end - first)
