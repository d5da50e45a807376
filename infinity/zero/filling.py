"""Fills what a device's memory has left with optimizer states, once a step has shown how much that is.

[Note: what is left]
Torch counts what is allocated, and the most that ever was. The difference between the two at the end of a step is what
a step takes beside what lies on the device between steps: activations, gradients on their way, a kernel's scratch. What
is free less that, less a headroom for the allocator's slack and for batches that are a little longer, can be filled.

[Note: longer batches]
A batch with more elements than any before is taken to need more in proportion. Where that leaves too little free, units
go back before its forward pass, the last first, on one rank between two steps. What grows faster than in proportion, or
is no input of the model, raises the most that was, and shows at the end of its step if there was room for it: where
half of the headroom was used, units go back until it is there again. If there was no room, the device is out of memory
in the middle of the step, which is lost as any step that fails; half of what had come goes back, so that the same batch
can be tried again.
"""

from __future__ import annotations

import logging

import torch

from infinity.config import Config, format_size
from infinity.memory import Budget, DeviceLevel
from infinity.schedule.placement import grads_there_bytes, that_fit
from infinity.zero.build import Runtime

_log = logging.getLogger(__name__)
_BUSY, _SHORT = -1 << 62, -1 << 61  # in place of bytes: nothing can move now; the device was out of memory


def filling_of(runtime: Runtime, config: Config) -> Filling | None:
    """What fills the device's memory; None where nothing may come to it."""
    if not runtime.sizing.may_come:
        return None
    if config.tiering.fill_device == "auto" and runtime.parts.are_several:
        return None  # several ranks could not try a batch again that found no memory
    assert runtime.grads.device is not None
    return Filling(runtime, runtime.grads.device.budget, config)


class Filling:
    """Moves units' optimizer states between the device and their homes below, between steps.

    Attributes:
        came: units whose states have come to the device, in order.
    """

    def __init__(self, runtime: Runtime, device_grads: Budget, config: Config) -> None:
        self.came: list[int] = []
        self._runtime = runtime
        self._grads = device_grads
        self._states = Budget("device memory for optimizer states that came later", 0)
        self._headroom = config.tiering.device_headroom
        self._limit_bytes = config.tiering.device_memory_bytes
        self._filled = False
        self._short = False  # a pass has failed for lack of memory, and nothing has gone back yet
        self._most_bytes = 0  # that was ever allocated
        self._extra_bytes = 0  # see [Note: what is left]
        self._longest = 0  # elements of the largest batch so far
        self._bytes_per_element = 0.0  # of a batch, before states came, whose gradients and updates take their own part
        runtime.link.forget_peak()  # what the process took before, a model on the device say, is no step's

    def before_forward(self, elements: int, *, at_rest: bool) -> None:
        """A training forward begins, see [Note: longer batches].

        Args:
            elements: of all tensors that the model is given.
            at_rest: there are no gradients, no step that goes on, and no other rank.
        """
        before, self._longest = self._longest, max(self._longest, elements)
        if not (self.came and at_rest and 0 < before < elements) or self._runtime.pipeline.before_update is not None:
            return
        level = self._level()
        assert level is not None  # or nothing could have come
        expected_bytes = self._extra_bytes + int(self._bytes_per_element * (elements - before))
        missing_bytes = expected_bytes + self._headroom_bytes(level) - level.free_bytes
        if missing_bytes > self._headroom_bytes(level) // 2:
            self._extra_bytes = expected_bytes
            self._shrink(missing_bytes, "a batch is longer than those before")

    def after_step(self) -> None:
        """A step is over, and its updates are done or queued; all ranks call this together, and do the same."""
        level = self._level()
        if level is None:
            return
        spare_bytes = self._least(self._told(level))
        if spare_bytes == _BUSY:
            return
        if not self._filled:
            self._filled = True
            self._bytes_per_element = self._extra_bytes / max(1, self._longest)
            self._fill(spare_bytes)
        elif spare_bytes == _SHORT:
            self._give_half()
        elif self.came and spare_bytes < 0:
            self._shrink(-spare_bytes, "a step took more of the device's memory than those before")

    def _told(self, level: DeviceLevel) -> int:
        """What this rank could fill; below 0 what is to go back."""
        if self._runtime.pipeline.before_update is not None:
            return _BUSY  # a save looks on: what it wants of a unit is where it was
        if self._short:
            return _SHORT
        spare_bytes = self._spare_bytes(level)
        # What is left of the headroom is what it is for.
        return 0 if -self._headroom_bytes(level) // 2 <= spare_bytes < 0 else spare_bytes

    def _least(self, value: int) -> int:
        """Of all ranks' values: which units are updated on the device must be the same on all of them."""
        for others in (self._runtime.ranks, self._runtime.parts.ranks):
            value = others.least(value)
        return value

    def out_of_memory(self, *, at_rest: bool) -> None:
        """A pass has failed for lack of memory: half of what came goes back, now or at the end of the step.

        Args:
            at_rest: there are no gradients, no step that goes on, and no other rank.
        """
        self._short = True
        self._level()  # what was there then has raised the most that was, and not what stays there afterwards
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
        """What can be filled; below 0 if too much is."""
        spare = level.free_bytes - self._extra_bytes - self._headroom_bytes(level)
        if self._limit_bytes is not None:
            spare = min(spare, self._limit_bytes - self._runtime.device.shares_bytes)
        return spare

    def _headroom_bytes(self, level: DeviceLevel) -> int:
        return int(self._headroom * level.total_bytes)

    def _fill(self, spare_bytes: int) -> None:
        """Have as many units come as there is room for."""
        runtime = self._runtime
        runtime.executor.drain()
        # States are to lie in segments of their own: in one that a step's large tensors have left, the next step would
        # find no piece of that size again.
        runtime.link.release_cached()
        sizing = runtime.sizing
        for unit in that_fit(sizing.rules, sizing.shards, sizing.may_come, spare_bytes):
            if not self._come(unit):
                break
            runtime.sums.give_up(unit)
            self.came.append(unit)
            self._count(runtime.states.nbytes(unit))
        if self.came:
            _log.info(
                "%s of optimizer states have come to the device, of %d units, which are updated there from now on",
                format_size(self._states.used_bytes),
                len(self.came),
            )

    def _come(self, unit: int) -> bool:
        """Have a unit come; False, and it stays below on all ranks, if a device has no room for it in pieces."""
        executor = self._runtime.executor
        try:
            executor.move_states(unit, there=True)
            came = True
        except torch.OutOfMemoryError:
            came = False
        if self._least(int(came)):
            return True
        if came:
            executor.move_states(unit, there=False)
        return False

    def _shrink(self, missing_bytes: int, why: str) -> None:
        """Have units go back until so much more is free."""
        count = 0
        for unit in reversed(self.came):
            if missing_bytes <= 0:
                break
            missing_bytes -= self._runtime.states.nbytes(unit)
            count += 1
        self._move_back(count, why)

    def _move_back(self, count: int, why: str) -> None:
        runtime = self._runtime
        runtime.executor.drain()
        for _ in range(count):
            unit = self.came[-1]
            runtime.executor.move_states(unit, there=False)
            self.came.pop()
            self._count(-runtime.states.nbytes(unit))
        _log.warning(
            "%s: the optimizer states of %d units have left it, %d stay; to leave more room from the start, raise "
            "tiering.device_headroom (%g of the memory)",
            why,
            count,
            len(self.came),
            self._headroom,
        )

    def _count(self, states_bytes: int) -> None:
        """Let the ledger say what has come, or gone, and what gradients may take there now."""
        ledger = self._runtime.device
        ledger.widen("optimizer states that came later", self._states, states_bytes)
        if states_bytes > 0:
            self._states.take(states_bytes, "optimizer states")
        else:
            self._states.give(-states_bytes)
        sizing = self._runtime.sizing
        grads_bytes = grads_there_bytes(sizing.rules, sizing.shards, self.came)
        ledger.widen("gradients on the device", self._grads, grads_bytes - self._grads.capacity_bytes)
