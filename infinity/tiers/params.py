"""Parameters of a unit: resident on the compute device, or stored in the tier below.

`ParamStore` is what the executor drives. `UnifiedParams` serves a machine whose compute device is the CPU: device
and host are one memory, and a unit is computed on straight from the buffer that the disk filled.
`DiscreteParams` (discrete.py) serves a device with memory of its own.

[Note: stable storage]
Autograd saves views of the weights (`weight.t()` for a linear layer) and uses them in backward, after the unit
may have been evicted and fetched again. So a unit's flat tensor keeps one storage for the whole run, and only
the memory behind it comes and goes: pages of a reserved address range on the CPU, a resized storage on CUDA (as
FSDP2 does). A touch while the unit is away faults; it never reads another unit's bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from infinity.io import IoFuture, Priority, Span
from infinity.memory import Budget, StableBuffer
from infinity.telemetry import Counters, StallCause
from infinity.tiers.sharding import WHOLE, Piece, Sharding
from infinity.tiers.swap import Extent, SwapSpace


class Residency(Enum):
    """Where a unit's parameters are. Every transition is one method of `ParamStore`."""

    STORED = auto()
    FETCHING = auto()
    RESIDENT = auto()
    WRITING_BACK = auto()


@dataclass(frozen=True)
class FlatSpec:
    """The flat parameter tensor of one unit.

    Attributes:
        name: the unit's name, for messages.
        numel: elements, padded; the first `trainable_numel` of them are trainable.
        dtype: compute dtype.
        offloaded: its home is the tier below; otherwise it is always resident.
        sharding: which slice of it is this rank's; the home and the host have this slice alone.
    """

    name: str
    numel: int
    trainable_numel: int
    dtype: torch.dtype
    offloaded: bool
    sharding: Sharding = WHOLE

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
class Arrival:
    """Values on their way into host memory, and what they come over."""

    future: IoFuture
    cause: StallCause


class ParamStore(ABC):
    """Residency of every unit's parameters.

    One thread (the compute thread) drives the transitions; `write_tile` may be called from the optimizer's.
    """

    def __init__(self, specs: Sequence[FlatSpec], counters: Counters) -> None:
        self.specs = tuple(specs)
        self._counters = counters
        self._residency = [Residency.STORED] * len(specs)
        self._pins = [0] * len(specs)
        self._dirty = [False] * len(specs)

    # State #

    def residency(self, unit: int) -> Residency:
        return self._residency[unit]

    def is_dirty(self, unit: int) -> bool:
        """The resident values are newer than the home's."""
        return self._dirty[unit]

    def set_dirty(self, unit: int, dirty: bool) -> None:
        self._dirty[unit] = dirty and self.specs[unit].offloaded

    def pin(self, unit: int) -> None:
        """Keep the unit from being evicted; pairs with `unpin`."""
        self._pins[unit] += 1

    def unpin(self, unit: int) -> None:
        if not self._pins[unit]:
            raise RuntimeError(f"unit {self.specs[unit].name} is not pinned")
        self._pins[unit] -= 1

    def keep_pins(self, units: Collection[int]) -> None:
        """One pin on each of these units, and no other: nothing is in use."""
        self._pins = [int(unit in units) for unit in range(len(self._pins))]

    def is_evictable(self, unit: int) -> bool:
        return (
            self.specs[unit].offloaded
            and self._residency[unit] is Residency.RESIDENT
            and not self._pins[unit]
            and not self._dirty[unit]
        )

    def _check_evictable(self, unit: int) -> None:
        if not self.is_evictable(unit):
            raise RuntimeError(f"unit {self.specs[unit].name} is in use or dirty and cannot be evicted")

    def is_pinned(self, unit: int) -> bool:
        return self._pins[unit] > 0

    def _move(self, unit: int, source: Residency, target: Residency) -> None:
        if self._residency[unit] is not source:
            raise RuntimeError(
                f"unit {self.specs[unit].name} cannot become {target.name}: it is "
                f"{self._residency[unit].name}, not {source.name}"
            )
        self._residency[unit] = target

    # Transitions #

    @abstractmethod
    def tensor(self, unit: int) -> torch.Tensor:
        """The flat tensor on the compute device; its memory is valid while the unit is RESIDENT."""

    @abstractmethod
    def host_tensor(self, unit: int) -> torch.Tensor:
        """This rank's shard in host memory, where the optimizer updates it; valid between `host_open` and
        `host_close` once `host_ready` is done."""

    @abstractmethod
    def create(self, unit: int) -> bool:
        """Give a unit that has no values yet memory on the host, to be written through `host_tensor`; False if there
        is no room. Pairs with `create_done`."""

    @abstractmethod
    def create_done(self, unit: int) -> None:
        """The values are written: the unit is STORED or RESIDENT with them."""

    @abstractmethod
    def create_failed(self, unit: int) -> None:
        """Takes the place of `create_done` where the values could not be made: the memory is free again."""

    @abstractmethod
    def fetch_start(self, unit: int, priority: Priority, *, updated: bool = False) -> bool:
        """STORED -> FETCHING; False if there is no room now.

        Args:
            updated: an update waits for the values, on the host.
        """

    def advance(self, unit: int) -> None:  # noqa: B027  (a fetch in one leg has nothing to do here)
        """Start the next leg of a fetch whose last one is done, if it has several; the unit awaits no update."""

    @abstractmethod
    def fetch_wait(self, unit: int) -> None:
        """FETCHING -> RESIDENT: the values are valid for the compute device.

        Raises:
            StorageError: reading failed; the unit is STORED again.
        """

    @abstractmethod
    def evict(self, unit: int) -> None:
        """RESIDENT -> STORED; the unit must be evictable."""

    @abstractmethod
    def host_open(self, unit: int) -> bool:
        """Start bringing the values into host memory, for an update or a look; the unit is FETCHING or RESIDENT, and
        pinned until `host_close`. False if there is no room now."""

    @abstractmethod
    def host_ready(self, unit: int) -> Arrival | None:
        """What `host_tensor` still waits for, if anything."""

    def host_wait(self, unit: int) -> None:
        """Wait until `host_tensor` has the values."""
        arrival = self.host_ready(unit)
        if arrival is not None:
            with self._counters.stalled(arrival.cause):
                arrival.future.result()

    def publish(self, unit: int) -> None:  # noqa: B027  (device and host may be one memory)
        """What was changed in `host_tensor` reaches the device, if the unit is there already."""

    @abstractmethod
    def host_close(self, unit: int) -> None:
        """The values may leave host memory; what was changed in them has been published."""

    @abstractmethod
    def write_tile(self, unit: int, start: int, numel: int) -> IoFuture | None:
        """Write a range of `host_tensor` to the home; None where there is nothing to write to."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back. Nothing may be in flight."""


class UnifiedParams(ParamStore):
    """Parameters on a machine whose compute device is the CPU."""

    def __init__(self, specs: Sequence[FlatSpec], swap: SwapSpace | None, budget: Budget, counters: Counters) -> None:
        super().__init__(specs, counters)
        self._budget = budget
        self._swap = swap
        self._homes: list[Extent | None] = [
            swap.reserve(spec.nbytes) if spec.offloaded and swap is not None else None for spec in specs
        ]
        self._buffers = [StableBuffer(spec.nbytes) for spec in specs]
        self._tensors = [b.tensor(s.dtype, s.numel) for b, s in zip(self._buffers, specs, strict=True)]
        self._reads: dict[int, IoFuture] = {}

    def tensor(self, unit: int) -> torch.Tensor:
        return self._tensors[unit]

    def host_tensor(self, unit: int) -> torch.Tensor:
        return self._tensors[unit]

    def _allocate(self, unit: int) -> bool:
        spec = self.specs[unit]
        if spec.offloaded and not self._budget.fits(spec.nbytes):
            return False
        if spec.offloaded:
            self._budget.take(spec.nbytes, spec.name)
        with self._counters.stalled(StallCause.ALLOCATOR):
            self._buffers[unit].allocate()
        return True

    def create(self, unit: int) -> bool:
        return self._allocate(unit)

    def create_done(self, unit: int) -> None:
        self._move(unit, Residency.STORED, Residency.RESIDENT)
        self.set_dirty(unit, True)

    def create_failed(self, unit: int) -> None:
        if self.specs[unit].offloaded:
            self._free(unit)

    def fetch_start(self, unit: int, priority: Priority, *, updated: bool = False) -> bool:
        home = self._homes[unit]
        if home is None or self._swap is None:
            raise RuntimeError(f"unit {self.specs[unit].name} has no home to fetch from")
        if not self._allocate(unit):
            return False
        self._move(unit, Residency.STORED, Residency.FETCHING)
        self._reads[unit] = self._swap.read(home, self._span(unit, 0, self.specs[unit].numel), priority=priority)
        self._counters.moved("nvme_read", self.specs[unit].nbytes, self._reads[unit], unit, "parameters")
        return True

    def fetch_wait(self, unit: int) -> None:
        try:
            with self._counters.stalled(StallCause.DISK_READ):
                self._reads.pop(unit).result()
        except BaseException:
            self._move(unit, Residency.FETCHING, Residency.STORED)
            self._free(unit)
            raise
        self._move(unit, Residency.FETCHING, Residency.RESIDENT)

    def evict(self, unit: int) -> None:
        self._check_evictable(unit)
        self._move(unit, Residency.RESIDENT, Residency.STORED)
        self._free(unit)

    def _free(self, unit: int) -> None:
        with self._counters.stalled(StallCause.ALLOCATOR):
            self._buffers[unit].free()
        self._budget.give(self.specs[unit].nbytes)

    def host_open(self, unit: int) -> bool:
        self.pin(unit)
        return True

    def host_ready(self, unit: int) -> Arrival | None:
        read = self._reads.get(unit)
        return None if read is None else Arrival(read, StallCause.DISK_READ)

    def host_close(self, unit: int) -> None:
        self.unpin(unit)

    def _span(self, unit: int, start: int, numel: int) -> Span:
        itemsize = self.specs[unit].dtype.itemsize
        return self._buffers[unit].span(start * itemsize, numel * itemsize)

    def write_tile(self, unit: int, start: int, numel: int) -> IoFuture | None:
        home = self._homes[unit]
        if home is None or self._swap is None:
            return None
        span = self._span(unit, start, numel)
        write = self._swap.write(home, span, start * self.specs[unit].dtype.itemsize)
        self._counters.moved("nvme_write", span.nbytes, write, unit, "parameters")
        return write

    def close(self) -> None:
        for buffer, spec in zip(self._buffers, self.specs, strict=True):
            if spec.offloaded:
                buffer.close()
        # What stays may be read as any tensor, also by whoever keeps a state dict: it goes with the last reference.
        self._buffers.clear()
        self._tensors = [tensor.new_empty(0) for tensor in self._tensors]
