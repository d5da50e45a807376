"""Optimizer states that move to the device during a training: the engine's own `Filling`, on simulated memory.

The device memory that a step needs in addition to the states grows with its batch and with the modules that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch

from infinity.kernels import scratch_bytes
from infinity.memory import Budget, DeviceLevel
from infinity.memory.budget import Ledger
from infinity.schedule.needs import Shards
from infinity.simulation.clock import Clock, Operation, Transfer
from infinity.simulation.invariants import violate
from infinity.tiers import Memory
from infinity.zero.filling import Filling

if TYPE_CHECKING:
    from infinity.simulation.model import Config, Pass, UnitSpec

TILE_BYTES = 16  # of a tile of optimizer states
_ELEMENT_BYTES, _USE_BYTES = 20, 10  # needed by a step for each element of its batch, and for each use of a module
_HEADROOM = 0.1
_RULES: Any = SimpleNamespace(
    grads=SimpleNamespace(holds_all=False, reconstructs=False, spills=False, stream=False),
    states=SimpleNamespace(home=Memory.HOST),
)


def need_bytes(call: Pass) -> int:
    """Return the device memory in bytes that a pass needs in addition to optimizer states."""
    return _ELEMENT_BYTES * call.elements + _USE_BYTES * len(call.uses)


def device_bytes_of(units: Sequence[UnitSpec], call: Pass) -> int:
    """Return device memory in bytes that is enough for a pass and for the states of all units that may move."""
    tiles = [unit.tiles for unit in units if unit.comes]
    filled_bytes = sum(tiles) * (TILE_BYTES + 1) + scratch_bytes(max(tiles, default=0))
    return int((need_bytes(call) + filled_bytes) / (1 - _HEADROOM)) + 2


class DeviceRoom:
    """Memory for a unit's states on the device; `versions` has the version of each tile, by its start."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.versions: dict[int, int] = {}


class DeviceMemory:
    """Memory of the compute device.

    Attributes:
        is_filling: whether the training has begun, so that new states on the device count.
    """

    def __init__(self, clock: Clock, config: Config) -> None:
        self.total_bytes = config.device_bytes
        self.is_filling = False
        self._clock = clock
        self._come: WeakSet[DeviceRoom] = WeakSet()
        self._refused = config.refused
        self._most_bytes = 0

    @property
    def used_bytes(self) -> int:
        return sum(room.nbytes for room in self._come)

    def level(self) -> DeviceLevel:
        used_bytes = self.used_bytes
        return DeviceLevel(self.total_bytes, self.total_bytes - used_bytes, used_bytes, self._most_bytes)

    def compute(self, call: Pass) -> None:
        """Use the memory of a pass. Raises OutOfMemoryError if there is too little."""
        self._most_bytes = max(self._most_bytes, self.used_bytes + need_bytes(call))
        if self._most_bytes > self.total_bytes:
            self._most_bytes = self.total_bytes
            raise torch.OutOfMemoryError("the device has no memory for a batch")

    # As the engine's `DeviceStates` #

    def room(self, numel: int) -> DeviceRoom:
        room = DeviceRoom(numel * TILE_BYTES)
        if self.is_filling:
            self._refused -= 1
            if not self._refused:
                raise torch.OutOfMemoryError("the device has no memory in one piece")
            self._come.add(room)
        return room

    def download(self, states: DeviceRoom, start: int, _: int, target: Any) -> Transfer:
        version = states.versions.pop(start)

        def end(_: Operation) -> None:
            target.value = version

        return Transfer(self._clock, self._clock.start("states download", -1, end))

    def upload(self, states: DeviceRoom, start: int, _: int, source: Any) -> Transfer:
        version = source.value

        def end(_: Operation) -> None:
            if source.value != version:
                violate("race", "states change while they are uploaded")
            states.versions[start] = version

        return Transfer(self._clock, self._clock.start("states upload", -1, end))


def filling_of(
    config: Config,
    device: DeviceMemory,
    states: Any,
    least: Callable[[int], int],
    drain: Callable[[], None],
    move_states: Callable[..., None],
) -> Filling | None:
    """Return the engine's `Filling` for a rank; None if no states may move to the device.

    Args:
        least: returns the smallest of all ranks' values.
    """
    coming = [unit for unit, spec in enumerate(config.units) if spec.comes]
    if not coming:
        return None
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    numels = [spec.tiles if spec.grads else 0 for spec in config.units]
    there = frozenset(unit for unit, spec in enumerate(config.units) if spec.on_device)
    shards = Shards(numels, 1, lambda numel: numel * TILE_BYTES, torch.int8, (), there)
    runtime = SimpleNamespace(
        link=SimpleNamespace(forget_peak=nothing, release_cached=nothing, level=device.level),
        pipeline=SimpleNamespace(before_update=None),
        ranks=SimpleNamespace(least=least),
        parts=SimpleNamespace(ranks=SimpleNamespace(least=int)),
        sizing=SimpleNamespace(rules=_RULES, shards=shards, may_come=coming),
        executor=SimpleNamespace(drain=drain, move_states=move_states),
        sums=SimpleNamespace(give_up=nothing),
        grads=SimpleNamespace(units=[None] * len(config.units)),
        states=states,
        device=Ledger("device memory", device.total_bytes),
    )
    settings = SimpleNamespace(tiering=SimpleNamespace(device_headroom=_HEADROOM, device_memory_bytes=None))
    return Filling(cast(Any, runtime), Budget("gradients on the device", 0), cast(Any, settings))


def check_filled(filling: Filling, device: DeviceMemory) -> None:
    """Check that the ledger counts the states that have moved to the device."""
    if filling._states.used_bytes != device.used_bytes:
        violate("ledger", f"{filling._states.used_bytes} bytes of states are counted, and {device.used_bytes} are used")
