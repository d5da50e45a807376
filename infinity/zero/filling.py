"""Fill spare device memory with optimizer states, after a step has shown how much memory is spare.

[Note: what is left]
Torch counts the allocated bytes, now and at their peak. The difference at the end of a step is the need of the step
itself: activations, gradients in transit, a kernel's scratch. The free memory minus this need, minus a headroom for the
allocator's slack and for slightly longer batches, can be filled.

[Note: longer batches]
A batch with more elements than any before is expected to need proportionally more memory. If that leaves too little
free memory, units move back before its forward pass, the last ones first; on one rank, and between two steps. The need
may also grow faster, or for a reason that the inputs of the model do not show. This raises the peak. If there was
enough memory, the peak is read at the end of the step: if half of the headroom was used, units move back until the
headroom is free again. If there was not enough, the device runs out of memory during the step, which is lost like any
failed step. Then half of the moved units move back, so that the same batch can be tried again.
"""

from __future__ import annotations

import logging

import torch

from infinity.config import Config, format_size
from infinity.memory import Budget, DeviceLevel
from infinity.schedule.needs import device_grads, units_that_fit
from infinity.zero.build import Runtime
from infinity.zero.ranks import least_of

_log = logging.getLogger(__name__)
_BUSY, _SHORT = -1 << 62, -1 << 61  # instead of bytes: states cannot move now; the device was out of memory


def filling_of(runtime: Runtime, config: Config) -> Filling | None:
    """Return the object that fills the device's memory; None if no states may move to the device."""
    if not runtime.sizing.may_come:
        return None
    if config.tiering.fill_device == "auto" and runtime.parts.are_several:
        return None  # several ranks could not repeat a batch that ran out of memory
    assert runtime.device_grads is not None
    return Filling(runtime, runtime.device_grads.budget, config)


class Filling:
    """Move units' optimizer states between the device and their homes, between steps.

    Attributes:
        came: units whose states have moved to the device, in order.
    """

    def __init__(self, runtime: Runtime, device_grads: Budget, config: Config) -> None:
        self.came: list[int] = []
        self._runtime = runtime
        self._grads = device_grads
        self._states = Budget("device memory for optimizer states that came later", 0)
        self._headroom = config.tiering.device_headroom
        self._limit_bytes = config.tiering.device_memory_bytes
        self._filled = False
        self._short = False  # a pass ran out of memory, and no unit has moved back yet
        self._most_bytes = 0  # peak of allocated bytes
        self._extra_bytes = 0  # need of a step, see [Note: what is left]
        self._longest = 0  # elements of the largest batch so far
        self._bytes_per_element = 0.0  # need of a batch before states moved; later, their gradients need memory, too
        runtime.link.forget_peak()  # earlier peaks, of loading a model for example, belong to no step

    def before_forward(self, elements: int, *, at_rest: bool) -> None:
        """Move units back before the training forward of a longer batch, see [Note: longer batches].

        Args:
            elements: number of elements of all tensors that the model is given.
            at_rest: whether there are no gradients, no unfinished step, and no other rank.
        """
        before, self._longest = self._longest, max(self._longest, elements)
        if not (self.came and at_rest and 0 < before < elements) or self._runtime.pipeline.before_update is not None:
            return
        level = self._level()
        assert level is not None  # known, because states are on the device
        expected_bytes = self._extra_bytes + int(self._bytes_per_element * (elements - before))
        missing_bytes = expected_bytes + self._headroom_bytes(level) - level.free_bytes
        if missing_bytes > self._headroom_bytes(level) // 2:
            self._extra_bytes = expected_bytes
            self._shrink(missing_bytes, "a batch is longer than all before")

    def after_step(self) -> None:
        """Move units after a step whose updates are done or queued. All ranks call this together, and move alike."""
        level = self._level()
        if level is None:
            return
        spare_bytes = self._agreed(self._told(level))
        if spare_bytes == _BUSY:
            return
        if not self._filled:
            self._filled = True
            self._bytes_per_element = self._extra_bytes / max(1, self._longest)
            self._fill(spare_bytes)
        elif spare_bytes == _SHORT:
            self._give_half()
        elif self.came and spare_bytes < 0:
            self._shrink(-spare_bytes, "a step took more of the device's memory than all before")

    def _told(self, level: DeviceLevel) -> int:
        """Return the bytes that this rank could fill; if negative, the bytes to free."""
        if self._runtime.pipeline.before_update is not None:
            return _BUSY  # a save reads states where they were
        if self._short:
            return _SHORT
        spare_bytes = self._spare_bytes(level)
        # Half of the headroom may be used.
        return 0 if -self._headroom_bytes(level) // 2 <= spare_bytes < 0 else spare_bytes

    def _agreed(self, value: int) -> int:
        """Return the smallest of all ranks' values: units updated on the device must be the same on all ranks."""
        return least_of(value, self._runtime.ranks, self._runtime.parts.ranks)

    def out_of_memory(self, *, at_rest: bool) -> None:
        """Move half of the units back after a pass ran out of memory, now or at the end of the step.

        Args:
            at_rest: whether there are no gradients, no unfinished step, and no other rank.
        """
        self._short = True
        self._level()  # record the peak with the current allocation, before it changes
        if at_rest:
            self._give_half()

    def _give_half(self) -> None:
        self._short = False
        if self.came:
            self._move_back(-(-len(self.came) // 2), "the device was out of memory")

    def _level(self) -> DeviceLevel | None:
        level = self._runtime.link.level()
        if level is not None and level.most_bytes > self._most_bytes:
            self._most_bytes = level.most_bytes
            self._extra_bytes = max(self._extra_bytes, level.most_bytes - level.allocated_bytes)
        return level

    def _spare_bytes(self, level: DeviceLevel) -> int:
        """Return the bytes that can be filled; negative if too many are filled."""
        spare = level.free_bytes - self._extra_bytes - self._headroom_bytes(level)
        if self._limit_bytes is not None:
            spare = min(spare, self._limit_bytes - self._runtime.device.shares_bytes)
        return spare

    def _headroom_bytes(self, level: DeviceLevel) -> int:
        return int(self._headroom * level.total_bytes)

    def _fill(self, spare_bytes: int) -> None:
        """Move as many units as fit to the device."""
        runtime = self._runtime
        runtime.executor.drain()
        # States must be in new segments of the allocator. In a segment that a step's large tensors have freed, they
        # would leave the next step no contiguous piece of that size.
        runtime.link.release_cached()
        sizing = runtime.sizing
        for unit in units_that_fit(sizing.rules, sizing.shards, sizing.may_come, spare_bytes):
            if not self._come(unit):
                break
            runtime.sums.give_up(runtime.grads.units[unit])
            self.came.append(unit)
            self._count(runtime.states.units[unit].nbytes)
        if self.came:
            _log.info(
                "%s of optimizer states moved to the device, of %d units, which are updated on it from now on",
                format_size(self._states.used_bytes),
                len(self.came),
            )

    def _come(self, unit: int) -> bool:
        """Move a unit to the device. If one rank's device has no room, return False; the unit then moves on no rank."""
        executor = self._runtime.executor
        try:
            executor.move_states(unit, to_device=True)
            came = True
        except torch.OutOfMemoryError:
            came = False
        if self._agreed(came):
            return True
        if came:
            executor.move_states(unit, to_device=False)
        return False

    def _shrink(self, missing_bytes: int, why: str) -> None:
        """Move units back until `missing_bytes` more bytes are free."""
        count = 0
        for unit in reversed(self.came):
            if missing_bytes <= 0:
                break
            missing_bytes -= self._runtime.states.units[unit].nbytes
            count += 1
        self._move_back(count, why)

    def _move_back(self, count: int, why: str) -> None:
        runtime = self._runtime
        runtime.executor.drain()
        for _ in range(count):
            unit = self.came[-1]
            runtime.executor.move_states(unit, to_device=False)
            self.came.pop()
            self._count(-runtime.states.units[unit].nbytes)
        _log.warning(
            "%s: the optimizer states of %d units have left it, %d stay; to leave more room from the start, raise "
            "tiering.device_headroom (%g of the memory)",
            why,
            count,
            len(self.came),
            self._headroom,
        )

    def _count(self, states_bytes: int) -> None:
        """Update the ledger with the moved states, and with the memory that gradients may now use on the device."""
        ledger = self._runtime.device
        ledger.widen("optimizer states that came later", self._states, states_bytes)
        if states_bytes > 0:
            self._states.take(states_bytes, "optimizer states")
        else:
            self._states.give(-states_bytes)
        sizing = self._runtime.sizing
        grads_bytes = device_grads(sizing.rules, sizing.shards, self.came).overlap
        ledger.widen("gradients on the device", self._grads, grads_bytes - self._grads.capacity_bytes)
