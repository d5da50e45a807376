"""What autograd saves in forward, kept in a lower tier until backward asks for it.

[Note: which activations are in memory]
The arena is a cache over the drive. A saved tensor is copied into it and written at once; when room is needed, what
backward needs last goes. That is what was saved first, as backward runs the other way round; but of layer-major
micro-batches, backward takes the rounds the other way round, and in a round the micro-batches in their order. As
backward frees what it has used, the next ones are read ahead into the room. With checkpointing, what autograd saves is
little but the checkpoints.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from infinity.errors import CapacityError, InfinityError
from infinity.io import IoFuture, Priority
from infinity.memory import Arena, Lease
from infinity.telemetry import Counters, StallCause
from infinity.tiers.activation_file import ActivationFiles, Place
from infinity.tiers.link import Link, Token

_LEAST_BYTES = 32 << 10  # of a tensor that is worth a request


class ActivationStore:
    """Holds saved tensors in host memory, and on a drive if there is one.

    Args:
        link: to the compute device.
        memory_bytes: of the arena. What does not fit and cannot go to a drive stays where it is.
        files: None without a drive.
        keep: storages that are left alone, by `_cdata`: parameters and buffers are no activations.
    """

    def __init__(
        self, link: Link, memory_bytes: int, files: ActivationFiles | None, keep: Collection[int], counters: Counters
    ) -> None:
        self._link = link
        self._arena = Arena(memory_bytes, pin=link.device.type == "cuda")
        self._files = files
        self._keep = frozenset(keep)
        self._counters = counters
        self._closed = False
        self._count = 0
        self._turn = (0, 0)
        self._coming: deque[_Entry] = deque()  # on their way from the device, in the order in which they were saved
        self._here = _ByNeed()  # in the arena
        self._away = _ByNeed()  # on the drive only
        self._dropped: deque[_Entry] = deque()  # autograd has freed them; filled from any thread
        self._leaving: list[_Entry] = []  # dropped, with a move under way

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What autograd saves inside goes through this store."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def take_turn(self, round_index: int, micro_batch: int) -> None:
        """What is saved from now on belongs to this round of layer-major micro-batches, and to this one of them."""
        self._turn = (round_index, -micro_batch)

    @property
    def peak_bytes(self) -> int:
        """Host memory, at most so far."""
        return self._arena.peak_bytes

    @property
    def count(self) -> int:
        """How many tensors autograd holds through this store."""
        self._settle()
        return len(self._here) + len(self._away)

    def close(self) -> None:
        """Give memory and files back; no backward can follow."""
        self._closed = True
        for entry in (*self._here, *self._leaving):
            if entry.move is not None:
                entry.move.synchronize()
        if self._files is not None:
            self._files.close()
        self._arena.close()

    # What autograd calls #

    def _pack(self, tensor: torch.Tensor) -> _Left | _Saved:
        if not self._takes(tensor):
            return _Left(tensor)
        self._settle()
        lease = self._room(_padded(tensor.nbytes))
        if lease is None:
            return _Left(tensor)
        entry = _Entry((*self._turn, self._count), tensor, lease)
        self._count += 1
        entry.move = self._link.download(entry.view(), tensor)
        self._counters.moved("device_to_host", entry.nbytes, entry.move, field="activations")
        self._coming.append(entry)
        self._here.add(entry)
        self._settle()
        return _Saved(entry, tensor, self._dropped)

    def _unpack(self, packed: _Left | _Saved) -> torch.Tensor:
        packed.version.check()
        if isinstance(packed, _Left):
            return packed.tensor
        if self._closed:
            raise InfinityError("the engine is closed: what autograd had saved in its tiers is gone")
        self._settle()
        entry = packed.entry
        if entry.source is not None:
            return entry.source
        if entry.lease is None:
            self._read(entry, Priority.DEMAND, self._needed_room(entry))
        if entry.read is not None:
            with self._counters.stalled(StallCause.DISK_READ):
                entry.read.result()
            entry.read = None
        target = torch.empty_strided(entry.size, entry.stride, dtype=entry.dtype, device=self._link.device)
        entry.move = self._link.upload(target, entry.view())
        self._counters.moved("host_to_device", entry.nbytes, entry.move, field="activations")
        self._link.compute_waits(entry.move)
        self._read_ahead(entry)
        return target

    def _takes(self, tensor: torch.Tensor) -> bool:
        return (
            type(tensor) is torch.Tensor
            and tensor.nbytes >= _LEAST_BYTES
            and tensor.is_floating_point()
            and tensor.layout is torch.strided
            and tensor.device == self._link.device
            and _padded(tensor.nbytes) <= self._arena.capacity_bytes
            and tensor.untyped_storage()._cdata not in self._keep
            and _is_dense(tensor)
        )

    # Room #

    def _room(self, nbytes: int) -> Lease | None:
        """A lease, for which what backward needs last leaves memory; None if nothing can."""
        while True:
            lease = self._arena.try_lease(nbytes)
            if lease is not None:
                return lease
            if not self._free_one():
                return None

    def _free_one(self) -> bool:
        """Have a lease given back, by waiting if need be; False if none can be."""
        for entry in self._leaving:
            self._wait(entry)
            self._settle()
            return True
        if self._files is None:
            return False
        for entry in self._here:
            if entry.read is None and entry.place is not None:
                self._wait(entry)
                entry.free()
                self._here.remove(entry)
                self._away.add(entry)
                return True
        for entry in self._here:  # still on its way from the device, or read ahead
            self._wait(entry)
            self._settle()
            return True
        return False

    def _needed_room(self, entry: _Entry) -> Lease:
        lease = self._room(_padded(entry.nbytes))
        if lease is None:
            raise CapacityError(
                f"no {entry.nbytes} bytes in one piece are left for an activation: raise tiering.activation_memory"
            )
        return lease

    def _wait(self, entry: _Entry) -> None:
        if entry.move is not None:
            with self._counters.stalled(StallCause.HOST_LINK):
                entry.move.synchronize()
        for future, cause in ((entry.write, StallCause.DISK_WRITE), (entry.read, StallCause.DISK_READ)):
            if future is not None:
                with self._counters.stalled(cause):
                    future.result()
        entry.read = None

    def _settle(self) -> None:
        """Take note of what is over: start writes, free what autograd has dropped."""
        while self._dropped:
            entry = self._dropped.popleft()
            (self._here if entry.lease is not None else self._away).remove(entry)
            self._leaving.append(entry)
        for entry in [entry for entry in self._leaving if entry.is_still()]:
            self._leaving.remove(entry)
            entry.free()
            if entry.place is not None and self._files is not None:
                self._files.give(entry.place, _padded(entry.nbytes))
        while self._coming and self._coming[0].has_moved():
            self._arrived(self._coming.popleft())

    def _arrived(self, entry: _Entry) -> None:
        """The values are in the arena: they can be written, and the device's memory be freed."""
        entry.source = None
        if self._files is None or entry.lease is None:
            return
        entry.place = self._files.take(_padded(entry.nbytes))
        entry.write = self._files.write(entry.place, entry.lease.span())
        self._counters.moved("nvme_write", entry.lease.nbytes, entry.write, field="activations")

    # Reads #

    def _read(self, entry: _Entry, priority: Priority, lease: Lease) -> None:
        assert self._files is not None  # only what was written has left memory
        assert entry.place is not None
        self._away.remove(entry)
        self._here.add(entry)
        entry.lease = lease
        entry.read = self._files.read(entry.place, lease.span(), priority)
        self._counters.moved("nvme_read", lease.nbytes, entry.read, field="activations")

    def _read_ahead(self, used: _Entry) -> None:
        """Read what is needed after this into the room that is free."""
        while (entry := self._away.next_after(used)) is not None:
            lease = self._arena.try_lease(_padded(entry.nbytes))
            if lease is None:
                return
            self._read(entry, Priority.PREFETCH, lease)


class _ByNeed:
    """Entries, those first that backward needs last."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __iter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry) -> None:
        insort(self._entries, entry, key=_need)

    def remove(self, entry: _Entry) -> None:
        del self._entries[bisect_left(self._entries, entry.need, key=_need)]

    def next_after(self, entry: _Entry) -> _Entry | None:
        """What backward needs next after this, which need not be one of these."""
        index = bisect_left(self._entries, entry.need, key=_need)
        return self._entries[index - 1] if index else None


class _Version:
    """Whether a tensor was changed in place since: torch's own check is off where saved tensors have hooks."""

    def __init__(self, tensor: torch.Tensor, witness: torch.Tensor) -> None:
        self._shape = tensor.shape
        self._witness = witness
        self._expected = tensor._version

    def check(self) -> None:
        """Refuse what torch refuses.

        Raises:
            RuntimeError: as without this store.
        """
        version = self._witness._version
        if version != self._expected:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._witness.type()} {list(self._shape)}] is at version {version}; expected version "
                f"{self._expected} instead."
            )


class _Left:
    """A tensor that stays where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = _Version(tensor, tensor)


class _Saved:
    """What autograd holds in place of a tensor that was taken."""

    def __init__(self, entry: _Entry, tensor: torch.Tensor, dropped: deque[_Entry]) -> None:
        self.entry = entry
        self._dropped = dropped
        witness = tensor.detach()
        witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)  # counts with it, without its memory
        self.version = _Version(tensor, witness)

    def __del__(self) -> None:
        self._dropped.append(self.entry)


class _Entry:
    """A saved tensor.

    Attributes:
        need: its place in the order in which backward needs them, reversed.
        source: the tensor itself, until its values are in the arena.
        lease: its memory in the arena; None while it is on the drive only.
        place: where it is on the drive.
        move, write, read: what is under way, or was last.
    """

    def __init__(self, need: tuple[int, int, int], tensor: torch.Tensor, lease: Lease) -> None:
        self.need = need
        self.size, self.stride = tensor.size(), tensor.stride()
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self.source: torch.Tensor | None = tensor
        self.lease: Lease | None = lease
        self.place: Place | None = None
        self.move: Token | None = None
        self.write: IoFuture | None = None
        self.read: IoFuture | None = None

    def view(self) -> torch.Tensor:
        """The values in the arena, in the tensor's own layout: kernels may round by it."""
        assert self.lease is not None
        flat = self.lease.tensor(self.dtype, self.nbytes // self.dtype.itemsize)
        return flat.as_strided(self.size, self.stride)

    def has_moved(self) -> bool:
        """No copy from or to the device is under way."""
        return self.move is None or self.move.query()

    def is_still(self) -> bool:
        """Nothing moves from or to the arena."""
        return self.has_moved() and all(future is None or future.done() for future in (self.write, self.read))

    def free(self) -> None:
        """Give the memory in the arena back."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None


def _need(entry: _Entry) -> tuple[int, int, int]:
    return entry.need


def _padded(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill a range of memory, each once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
