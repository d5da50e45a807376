"""Parameters on a device with memory of its own: device over pinned host memory over NVMe.

A unit's home is a host lease while the host budget lasts, else an extent. On its way between home and device, and
while the optimizer updates it on the host, a unit has an *image* in host memory: its home lease itself, or a
staging lease that is given back when nobody needs it any more.

Of a unit that several ranks share, home and image are this rank's shard, and a fetch fills the shard's place in the
tensor on the device; the others' places are filled by an all-gather, which is not this file's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infinity.io import IoFuture, Priority
from infinity.io.gds import DeviceReads
from infinity.memory import Arena, Budget, Lease, stable_memory
from infinity.telemetry import Counters, StallCause, Times
from infinity.tiers.link import Link, Token
from infinity.tiers.params import Arrival, FlatSpec, ParamStore, Residency
from infinity.tiers.sharding import Piece
from infinity.tiers.swap import Extent, SwapSpace


@dataclass
class _Image:
    """A unit's values in host memory.

    Attributes:
        arriving: the read or download that fills it, if one was started.
        users: fetches and updates that need it; a staging image goes with the last of them.
        overtakes: the device has the unit's values, or a copy of them has begun: what changes here must go there.
    """

    lease: Lease
    arriving: Arrival | None
    users: int = 1
    overtakes: bool = False


class _Copied(IoFuture):
    """A copy over the link, as something that the optimizer's thread can wait for."""

    def __init__(self, token: Token, nbytes: int) -> None:
        self._token = token
        self._nbytes = nbytes

    def done(self) -> bool:
        return self._token.query()

    def result(self, timeout: float | None = None) -> int:
        self._token.synchronize()
        return self._nbytes

    def times(self) -> Times | None:
        return self._token.times()


class DiscreteParams(ParamStore):
    """Parameters of a machine whose compute device has memory of its own.

    Args:
        arena: host memory for homes and staging images; pinned, for CUDA.
        home_bytes: host memory for units that live there; the others live in the swap space.
        device_budget: memory for units that are not always on the device.
        direct: reads from the swap files into device memory, past the host's; None where there is no such way.
    """

    def __init__(
        self,
        specs: Sequence[FlatSpec],
        link: Link,
        arena: Arena,
        home_bytes: int,
        swap: SwapSpace | None,
        device_budget: Budget,
        counters: Counters,
        direct: DeviceReads | None = None,
    ) -> None:
        super().__init__(specs, counters)
        self._direct = direct
        self._arrivals: dict[int, IoFuture] = {}  # units on their way past the host
        self._link = link
        self._arena = arena
        self._swap = swap
        self._budget = device_budget
        self._homes: list[Lease | Extent | None] = []
        for spec in specs:
            home: Lease | Extent | None = None
            if spec.offloaded and spec.shard_nbytes <= home_bytes:
                home = arena.lease(spec.shard_nbytes)
                home_bytes -= spec.shard_nbytes
            elif spec.offloaded and swap is not None:
                home = swap.reserve(spec.shard_nbytes)
            self._homes.append(home)
        self._memory = [stable_memory(spec.nbytes, link.device) for spec in specs]
        self._tensors: list[torch.Tensor] = []
        for memory, spec in zip(self._memory, specs, strict=True):
            memory.allocate()
            self._tensors.append(memory.tensor(spec.dtype, spec.numel))
            if spec.offloaded:
                memory.free()  # at once, so that the whole model is never there together
        self._images: dict[int, _Image] = {}
        self._uploads: dict[int, Token] = {}  # of units on their way
        self._last_uploads: dict[int, Token] = {}  # which may still read the unit's image
        self._last_download: Token | None = None
        self._retiring: list[tuple[Token, Lease]] = []

    def tensor(self, unit: int) -> torch.Tensor:
        return self._tensors[unit]

    def host_tensor(self, unit: int) -> torch.Tensor:
        return self._images[unit].lease.tensor(self.specs[unit].dtype)

    def set_dirty(self, unit: int, dirty: bool) -> None:
        """A home in host memory is never behind: updates work on it directly."""
        super().set_dirty(unit, dirty and isinstance(self._homes[unit], Extent))

    # Transitions #

    def create(self, unit: int) -> bool:
        image = self._home_image(unit) or self._staging_image(unit)
        if image is None:
            return False
        self._images[unit] = image
        return True

    def create_done(self, unit: int) -> None:
        if self.specs[unit].offloaded:
            write = self.write_tile(unit, 0, self.specs[unit].shard_numel)
            if write is not None:
                write.result()
            self._leave_image(unit)
            return
        self._compute_waits(self._upload(unit))
        self._leave_image(unit)
        self._move(unit, Residency.STORED, Residency.RESIDENT)

    def create_failed(self, unit: int) -> None:
        if unit in self._images:
            self._leave_image(unit)

    def fetch_start(self, unit: int, priority: Priority, *, updated: bool = False) -> bool:
        spec = self.specs[unit]
        if not self._budget.fits(spec.nbytes):
            return False
        image, home = self._home_image(unit), self._homes[unit]
        if self._direct is not None and isinstance(home, Extent) and not updated and len(spec.pieces) == 1:
            self._start_direct(unit, self._direct, home)
            return True
        if image is None:
            image = self._staging_image(unit)
            if image is None or self._swap is None or not isinstance(home, Extent):
                return False
            read = self._swap.read(home, image.lease.span(0, spec.shard_nbytes), priority=priority)
            image.arriving = Arrival(read, StallCause.DISK_READ)
            self._counters.moved("nvme_read", spec.shard_nbytes, read, unit, "parameters")
        self._images[unit] = image
        self._allocate(unit)
        self._move(unit, Residency.STORED, Residency.FETCHING)
        return True

    def _start_direct(self, unit: int, direct: DeviceReads, home: Extent) -> None:
        spec = self.specs[unit]
        assert self._swap is not None  # or the home were no extent
        self._allocate(unit)
        (own,) = spec.pieces
        target = self._tensors[unit].narrow(0, own.whole, own.numel).view(torch.uint8)
        pieces = self._swap.locate(home, spec.shard_nbytes)
        self._arrivals[unit] = direct.start(pieces, target, self._link.mark().synchronize)
        self._counters.moved("nvme_read", spec.shard_nbytes, self._arrivals[unit], unit, "parameters")
        self._move(unit, Residency.STORED, Residency.FETCHING)

    def advance(self, unit: int) -> None:
        if unit in self._arrivals:
            return
        if self._residency[unit] is Residency.FETCHING and unit not in self._uploads:
            arriving = self._images[unit].arriving
            if arriving is None or arriving.future.done():
                if arriving is not None:
                    arriving.future.result()
                self._uploads[unit] = self._upload(unit)

    def fetch_wait(self, unit: int) -> None:
        if unit in self._arrivals:
            try:
                with self._counters.stalled(StallCause.DISK_READ):
                    self._arrivals.pop(unit).result()
            except BaseException:
                self._move(unit, Residency.FETCHING, Residency.STORED)
                self._free(unit)
                raise
            self._move(unit, Residency.FETCHING, Residency.RESIDENT)
            return
        try:
            self.host_wait(unit)
        except BaseException:
            self._leave_image(unit)
            self._move(unit, Residency.FETCHING, Residency.STORED)
            self._free(unit)
            raise
        self.advance(unit)
        self._compute_waits(self._uploads.pop(unit))
        self._leave_image(unit)
        self._move(unit, Residency.FETCHING, Residency.RESIDENT)

    def evict(self, unit: int) -> None:
        self._check_evictable(unit)
        self._move(unit, Residency.RESIDENT, Residency.STORED)
        self._free(unit)

    def host_open(self, unit: int) -> bool:
        image = self._images.get(unit)
        if image is None:
            image = self._opened_image(unit)
            if image is None:
                return False
            image.overtakes = True
            self._images[unit] = image
        else:
            image.users += 1
            # Else a fetch uploads after the update.
            image.overtakes |= self._residency[unit] is Residency.RESIDENT or unit in self._uploads
        upload = self._last_uploads.get(unit)
        if upload is not None and not upload.query():  # what is changed while it is copied would arrive torn
            image.arriving = Arrival(_Copied(upload, self.specs[unit].shard_nbytes), StallCause.HOST_LINK)
        self.pin(unit)
        return True

    def _opened_image(self, unit: int) -> _Image | None:
        """An image of a unit that is on the device, or on its way there past the host; None if there is no room."""
        image = self._home_image(unit)
        if image is not None:
            return image
        if unit in self._arrivals:
            with self._counters.stalled(StallCause.DISK_READ):
                self._arrivals[unit].result()
        image = self._staging_image(unit)
        if image is not None:
            self._last_download = self._download(unit, image.lease)
            arriving = _Copied(self._last_download, self.specs[unit].shard_nbytes)
            image.arriving = Arrival(arriving, StallCause.HOST_LINK)
        return image

    def host_ready(self, unit: int) -> Arrival | None:
        return self._images[unit].arriving

    def publish(self, unit: int) -> None:
        image = self._images[unit]
        if image.overtakes:
            image.overtakes = False
            self._compute_waits(self._upload(unit))

    def host_close(self, unit: int) -> None:
        self.publish(unit)
        self._leave_image(unit)
        self.unpin(unit)

    def write_tile(self, unit: int, start: int, numel: int) -> IoFuture | None:
        home = self._homes[unit]
        if self._swap is None or not isinstance(home, Extent):
            return None
        itemsize = self.specs[unit].dtype.itemsize
        span = self._images[unit].lease.span(start * itemsize, numel * itemsize)
        write = self._swap.write(home, span, start * itemsize)
        self._counters.moved("nvme_write", span.nbytes, write, unit, "parameters")
        return write

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        retiring = [token for token, _ in self._retiring]
        for token in (*retiring, *self._last_uploads.values(), self._last_download):
            if token is not None:  # it reads or writes memory that goes
                token.synchronize()
        self._last_uploads.clear()
        self._retiring.clear()
        for memory, spec in zip(self._memory, self.specs, strict=False):  # none are left when it is closed again
            if spec.offloaded:
                memory.free()
        # What stays may be read as any tensor, also by whoever keeps a state dict: it goes with the last reference.
        self._memory.clear()
        self._tensors = [tensor.new_empty(0) for tensor in self._tensors]

    # Device memory #

    def _allocate(self, unit: int) -> None:
        """Give the unit's tensor memory; see [Note: stable storage]."""
        self._budget.take(self.specs[unit].nbytes, self.specs[unit].name)
        with self._counters.stalled(StallCause.ALLOCATOR):
            self._memory[unit].allocate()

    def _free(self, unit: int) -> None:
        with self._counters.stalled(StallCause.ALLOCATOR):
            self._memory[unit].free()
        self._budget.give(self.specs[unit].nbytes)

    def _upload(self, unit: int) -> Token:
        spec, source, target = self.specs[unit], self.host_tensor(unit), self._tensors[unit]
        for piece in spec.pieces:  # on one stream: the last copy's token is good for all
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self._link.upload(_part(target, piece.whole, piece), _part(source, piece.shard, piece))
            self._counters.moved("host_to_device", piece.numel * spec.dtype.itemsize, token, unit, "parameters")
        self._last_uploads[unit] = token
        return token

    def _download(self, unit: int, lease: Lease) -> Token:
        spec, source, target = self.specs[unit], self._tensors[unit], lease.tensor(self.specs[unit].dtype)
        for piece in spec.pieces:
            with self._counters.stalled(StallCause.HOST_LINK):
                token = self._link.download(_part(target, piece.shard, piece), _part(source, piece.whole, piece))
            self._counters.moved("device_to_host", piece.numel * spec.dtype.itemsize, token, unit, "parameters")
        return token

    def _compute_waits(self, token: Token) -> None:
        with self._counters.stalled(StallCause.HOST_LINK):
            self._link.compute_waits(token)

    # Images #

    def _home_image(self, unit: int) -> _Image | None:
        home = self._homes[unit]
        return _Image(home, None) if isinstance(home, Lease) else None

    def _staging_image(self, unit: int) -> _Image | None:
        """Memory for an image, waiting for uploads that still read theirs; None if updates hold it all."""
        self._reap()
        nbytes = self.specs[unit].shard_nbytes
        lease = self._arena.try_lease(nbytes)
        while lease is None and self._retiring:
            with self._counters.stalled(StallCause.HOST_LINK):
                self._retiring[0][0].synchronize()
            self._reap()
            lease = self._arena.try_lease(nbytes)
        return None if lease is None else _Image(lease, None)

    def _leave_image(self, unit: int) -> None:
        """One user less; after the last one, the memory is free once no upload reads it."""
        image = self._images[unit]
        image.users -= 1
        if image.users:
            return
        del self._images[unit]
        if image.lease is self._homes[unit]:
            return
        token = self._last_uploads.pop(unit, None)
        if token is None:
            image.lease.release()
        else:
            self._retiring.append((token, image.lease))

    def _reap(self) -> None:
        while self._retiring and self._retiring[0][0].query():
            self._retiring.pop(0)[1].release()


def _part(tensor: torch.Tensor, start: int, piece: Piece) -> torch.Tensor:
    return tensor[start : start + piece.numel]
