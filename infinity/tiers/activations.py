"""Tensors that autograd saves in forward, kept in a lower tier until backward needs them.

[Note: which activations are in memory]
The arena is a cache over the drive. A saved tensor is copied into it and written at once. When room is needed, the
tensor that backward needs last leaves the arena. This is the tensor that was saved first, because backward runs in
reverse order. With layer-major micro-batches, backward runs the rounds in reverse order, but the micro-batches of a
round in forward order. When backward frees used tensors, the next tensors are read ahead. With activation
checkpointing, autograd saves little more than the checkpoints.

A saved tensor is a field: on the device until it is downloaded, in the arena while there is room, and on the drive. In
backward, autograd gets a new tensor, of which the store keeps no copy.

[Note: uploads ahead]
An upload waits for all work that is already queued in the compute stream, because this work may still use the target's
memory. So an upload that starts when its tensor is needed never overlaps with computation. When backward asks for a
tensor, the uploads of the next tensors start, too. At most twice the bytes of the largest tensor are on the device
ahead of their use. The host and the streams wait only for events.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity.config import format_size, size_to_set
from infinity.errors import CapacityError, InfinityError
from infinity.io import IoStats, Priority
from infinity.memory import Arena, Lease, aligned
from infinity.telemetry import Counters, StallCause
from infinity.tiers.activation_file import ActivationFiles
from infinity.tiers.copies import Field, Memory, Move, State, Transfer
from infinity.tiers.link import Link
from infinity.tiers.striping import Piece

_NVME, _HOST, _DEVICE = Memory.NVME, Memory.HOST, Memory.DEVICE
_LEAST_BYTES = 32 << 10  # smaller tensors are not worth a request
_AHEAD = 2  # uploads ahead of their use, in units of the largest tensor


class ActivationStore:
    """Holds saved tensors in host memory, and on a drive if there is one.

    Args:
        link: to the compute device.
        memory_bytes: size of the arena. A tensor that does not fit and cannot go to a drive stays on the device.
        files: None without a drive.
        keep: storages to ignore, by `_cdata`: parameters and buffers are not activations.

    Attributes:
        arena: the host memory for saved tensors.
    """

    def __init__(
        self, link: Link, memory_bytes: int, files: ActivationFiles | None, keep: Collection[int], counters: Counters
    ) -> None:
        self._link = link
        self.arena = Arena(memory_bytes, pin=None if link.device.type == "cpu" else link.device)
        self._files = files
        self._keep = frozenset(keep)
        self._counters = counters
        self._closed = False
        self._count = 0
        self._turn = (0, 0)
        self._downloads: deque[tuple[_Entry, Move]] = deque()  # in flight, in their order
        self._largest_bytes = 0
        self._ahead_bytes = 0  # bytes on the device ahead of their use
        # In the reverse of the order in which backward needs them:
        self._here: list[_Entry] = []  # entries with memory in the arena
        self._away: list[_Entry] = []  # entries without
        self._dropped: deque[_Entry] = deque()  # freed by autograd; filled from any thread
        self._leaving: list[_Entry] = []  # freed by autograd, with a move in flight

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Store the tensors that autograd saves inside of this context."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def take_turn(self, round_index: int, micro_batch: int) -> None:
        """Set the round of layer-major micro-batches, and the micro-batch, that later tensors belong to."""
        self._turn = (round_index, -micro_batch)

    def io_stats(self) -> IoStats | None:
        """Return the I/O counters of its files; None without files."""
        return None if self._files is None else self._files.io_stats()

    @property
    def count(self) -> int:
        """Number of tensors that autograd holds through this store."""
        self._poll()
        return len(self._here) + len(self._away)

    def close(self) -> None:
        """Free memory and files, once all transfers have ended; no backward can follow."""
        self._closed = True
        for entry in (*self._here, *self._leaving):
            for move in entry.moves():
                with suppress(Exception):  # the outcome no longer matters
                    move.transfer.result()
        if self._files is not None:
            self._files.close()
        self.arena.close()

    # Hooks of autograd #

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        if not self._takes(tensor):
            return _Packed(tensor, None, self._dropped)
        self._poll()
        lease = self._room(aligned(tensor.nbytes))
        if lease is None:
            return _Packed(tensor, None, self._dropped)
        entry = _Entry((*self._turn, self._count), tensor, lease)
        self._count += 1
        self._largest_bytes = max(self._largest_bytes, entry.nbytes)
        download = self._link.download(entry.view(), tensor)
        self._downloads.append((entry, entry.begin_move(_DEVICE, _HOST, download, StallCause.HOST_LINK)))
        self._counters.moved("device_to_host", entry.nbytes, download, field="activations")
        insort(self._here, entry)
        self._poll()
        return _Packed(tensor, entry, self._dropped)

    def _unpack(self, packed: _Packed) -> torch.Tensor:
        packed.check_version()
        entry = packed.entry
        if entry is None:
            return packed.tensor
        if self._closed:
            raise InfinityError("the engine is closed: the tensors that autograd had saved in its tiers are freed")
        self._poll()
        if entry.source is not None:
            return entry.source
        if entry.ahead is None:
            if entry.lease is None:
                self._read(entry, Priority.DEMAND, self._needed_room(entry))
            if entry.state(_HOST) is State.ARRIVING:
                self._finish(entry)
            self._upload(entry)
        target = self._take_ahead(entry)
        assert target is not None
        self._upload_ahead(entry)
        self._read_ahead(entry)
        return target

    # Uploads #

    def _upload(self, entry: _Entry) -> None:
        """Start uploading an entry from the arena to a new tensor on the device."""
        target = torch.empty_strided(entry.size, entry.stride, dtype=entry.dtype, device=self._link.device)
        upload = self._link.upload(target, entry.view())
        entry.lend(_HOST, upload, StallCause.HOST_LINK)
        entry.ahead = target, upload
        self._ahead_bytes += entry.nbytes
        self._counters.moved("host_to_device", entry.nbytes, upload, field="activations")

    def _take_ahead(self, entry: _Entry) -> torch.Tensor | None:
        """Return the uploaded tensor, or None. The compute stream waits for the upload, so it may be read or freed."""
        if entry.ahead is None:
            return None
        (target, upload), entry.ahead = entry.ahead, None
        self._ahead_bytes -= entry.nbytes
        self._link.compute_waits(upload)
        return target

    def _upload_ahead(self, used: _Entry) -> None:
        """Start the uploads of the tensors that backward needs next, see [Note: uploads ahead]."""
        for entry in _after(self._here, used):
            fits = self._ahead_bytes + entry.nbytes <= _AHEAD * self._largest_bytes
            if entry.source is not None or not fits:
                return
            if entry.ahead is None:
                if entry.state(_HOST) is not State.VALID:
                    if not all(move.transfer.done() for move in entry.moves()):
                        return
                    self._finish(entry)
                try:
                    self._upload(entry)
                except torch.OutOfMemoryError:  # retried when backward asks for it; there may be room by then
                    return

    def _takes(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.nbytes >= _LEAST_BYTES
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.device == self._link.device
            and aligned(tensor.nbytes) <= self.arena.capacity_bytes
            and tensor.untyped_storage()._cdata not in self._keep
            and _is_dense(tensor)
        )

    # Room #

    def _room(self, nbytes: int) -> Lease | None:
        """Lease memory, if needed by evicting tensors that backward needs last. Return None if this is not possible."""
        while (lease := self.arena.try_lease(nbytes)) is None:
            if not self._free_one():
                return None
        return lease

    def _free_one(self) -> bool:
        """Take one step towards free room in the arena, and wait if needed. Return False if this is not possible."""
        for entry in self._leaving:
            self._finish(entry)
            self._poll()
            return True
        if self._files is None:
            return False
        for entry in self._here:
            if entry.state(_HOST) is State.VALID and entry.state(_NVME) is not State.ABSENT:
                self._finish(entry)
                entry.drop(_HOST)
                self._leave_arena(entry)
                return True
        for entry in self._here:  # being downloaded, or read ahead
            if entry.moves():
                self._finish(entry)
                self._poll()
                return True
        return False

    def _needed_room(self, entry: _Entry) -> Lease:
        nbytes, capacity_bytes = aligned(entry.nbytes), self.arena.capacity_bytes
        lease = self._room(nbytes)
        if lease is None:
            raise CapacityError(
                f"no {format_size(nbytes)} in one piece are left for an activation in tiering.activation_memory, "
                f"{format_size(capacity_bytes)}: raise it to {size_to_set(capacity_bytes + nbytes)} or more"
            )
        return lease

    def _finish(self, entry: _Entry) -> None:
        """Block until no move touches the entry."""
        try:
            for move in entry.moves():
                with self._counters.stalled(move.cause):
                    entry.finish_move(move)
        finally:
            if entry.state(_HOST) is State.ABSENT and entry.lease is not None and entry.version:
                self._leave_arena(entry)  # the read failed

    def _leave_arena(self, entry: _Entry) -> None:
        _remove(self._here, entry)
        insort(self._away, entry)
        entry.free()

    def _poll(self) -> None:
        """Process transfers that have ended: start writes, and free tensors that autograd has dropped."""
        while self._dropped:
            entry = self._dropped.popleft()
            _remove(self._here if entry.lease is not None else self._away, entry)
            self._take_ahead(entry)
            entry.consume()
            self._leaving.append(entry)
        for entry in [entry for entry in self._leaving if entry.has_left()]:
            self._leaving.remove(entry)
            entry.free()
            if entry.place is not None and self._files is not None:
                self._files.give(entry.place)
        while self._downloads and self._downloads[0][1].transfer.done():
            entry, download = self._downloads.popleft()
            entry.finish_move(download)
            if entry.is_newest(_HOST):
                self._arrived(entry)

    def _arrived(self, entry: _Entry) -> None:
        """Start writing an entry whose values are in the arena, and free the device's memory."""
        entry.drop(_DEVICE)
        entry.source = None
        if self._files is None or entry.lease is None:
            return
        entry.place = self._files.take(aligned(entry.nbytes))
        write = self._files.write(entry.place, entry.lease.span())
        entry.begin_move(_HOST, _NVME, write, StallCause.DISK_WRITE)
        self._counters.moved("nvme_write", entry.lease.nbytes, write, field="activations")

    # Reads #

    def _read(self, entry: _Entry, priority: Priority, lease: Lease) -> None:
        assert self._files is not None  # only written entries leave memory
        assert entry.place is not None
        read = self._files.read(entry.place, lease.span(), priority)
        entry.begin_move(_NVME, _HOST, read, StallCause.DISK_READ)
        _remove(self._away, entry)
        entry.lease = lease
        insort(self._here, entry)
        self._counters.moved("nvme_read", lease.nbytes, read, field="activations")

    def _read_ahead(self, used: _Entry) -> None:
        """Read the entries that backward needs after this one into free room."""
        while (entry := next(_after(self._away, used), None)) is not None:
            lease = self.arena.try_lease(aligned(entry.nbytes))
            if lease is None:
                return
            self._read(entry, Priority.PREFETCH, lease)


class _Packed:
    """The object that autograd holds for a saved tensor, stored or left on the device.

    It detects in-place changes of the tensor: torch does not check saved tensors that have hooks.
    """

    def __init__(self, tensor: torch.Tensor, entry: _Entry | None, dropped: deque[_Entry]) -> None:
        self.entry = entry
        self._dropped = dropped
        self._shape, self._expected = tensor.shape, tensor._version
        self.tensor = _without_graph(tensor)
        if entry is not None:
            self.tensor = tensor.detach()
            # Keeps the version counter and releases the memory.
            self.tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def __del__(self) -> None:
        if self.entry is not None:
            self._dropped.append(self.entry)

    def check_version(self) -> None:
        """Raise torch's own error, with its text, if the tensor was changed in place."""
        version = self.tensor._version
        if version != self._expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self._shape)}] is at version {version}; expected version "
                f"{self._expected} instead."
            )


class _Entry(Field):
    """A saved tensor.

    Attributes:
        need: sort key: the reverse of the order in which backward needs the tensors.
        source: the tensor, until its values are in the arena.
        lease: its memory in the arena; None while it is only on the drive.
        place: its place on the drive.
        ahead: a tensor on the device that has the values once the upload has ended, before autograd asks for it.
    """

    def __init__(self, need: tuple[int, int, int], tensor: torch.Tensor, lease: Lease) -> None:
        super().__init__("an activation", (_NVME, _HOST, _DEVICE))
        self.need = need
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.source: torch.Tensor | None = _without_graph(tensor)
        self.lease: Lease | None = lease
        self.place: Piece | None = None
        self.ahead: tuple[torch.Tensor, Transfer] | None = None
        self.begin_write(_DEVICE)
        self.end_write(_DEVICE)

    def __lt__(self, other: _Entry) -> bool:
        return self.need < other.need

    def view(self) -> torch.Tensor:
        """Return the values in the arena with the tensor's own strides: the results of kernels may depend on them."""
        assert self.lease is not None
        flat = self.lease.tensor(self.dtype, self.nbytes // self.dtype.itemsize)
        return flat.as_strided(self.size, self.stride)

    def has_left(self) -> bool:
        """Whether it was consumed and no move touches it."""
        return all(self.state(memory) is State.ABSENT or self.gone(memory) for memory in self.copies)

    def free(self) -> None:
        if self.lease is not None:
            self.lease.release()
            self.lease = None


def _remove(entries: list[_Entry], entry: _Entry) -> None:
    del entries[bisect_left(entries, entry)]


def _after(entries: list[_Entry], entry: _Entry) -> Iterator[_Entry]:
    """Yield the entries of the list that backward needs after `entry`, in its order. The list need not contain it."""
    for index in range(bisect_left(entries, entry) - 1, -1, -1):
        yield entries[index]


def _without_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its autograd graph. The graph holds the saved tensors: a cycle would never be freed."""
    return tensor if tensor.grad_fn is None else tensor.detach()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
