"""Methods of an engine that return its rank, the progress of its step, and the step's gradients."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.config import Config
from infinity.errors import InfinityError
from infinity.optim.optimizer import TieredOptimizer
from infinity.zero.build import Runtime
from infinity.zero.launch import launch_of
from infinity.zero.param_access import Place
from infinity.zero.sizing import DTYPES
from infinity.zero.step import Step


class Accessors:
    """A mixin of the engine, which sets these fields."""

    config: Config
    optimizer: TieredOptimizer
    _runtime: Runtime
    _step: Step

    # Ranks #

    @property
    def global_rank(self) -> int:
        """The rank of this process among all processes of the training."""
        return self._runtime.ranks.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among those on this machine, as set by the launcher; 0 without one."""
        launch = launch_of(os.environ)
        return 0 if launch is None else launch.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the training."""
        return self._runtime.ranks.size

    # The step #

    @property
    def in_forward(self) -> bool:
        """Whether the model's forward pass is running."""
        return self._step.hooks.in_forward

    @property
    def in_backward(self) -> bool:
        """Whether this thread runs a backward pass of the model."""
        return self._step.in_backward_now

    @property
    def awaits_step(self) -> bool:
        """Whether a backward pass has ended, and neither the next micro-batch nor the update has begun."""
        return self._step.awaits_step

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of the model's forward under `torch.autocast`; None without autocast."""
        return None if self.config.autocast is None else DTYPES[self.config.autocast]

    def get_lr(self) -> list[float]:
        """Return the learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    # Micro-batches #

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the parameters."""
        return self._step.counter.ends_step

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward pass is the last of its step, instead of counting calls of `step()`.

        Call it before the backward pass of every micro-batch, and `step()` after the last one. The value stays
        until the next call.

        Raises:
            InfinityError: no memory is reserved for the gradients of several passes under this configuration, or every
                `step()` ends a step (`managed_gradient_accumulation` is false).
        """
        if not self.config.managed_accumulation:
            raise InfinityError(
                "set_gradient_accumulation_boundary says where a step ends, but managed_gradient_accumulation is "
                "false, so that every step() ends one: leave the call out"
            )
        if not is_boundary and not self._runtime.sizing.rules.grads.holds_all:
            raise InfinityError(
                "set_gradient_accumulation_boundary(False) adds up the gradients of several backward passes, for which "
                "nothing is reserved: set gradient_accumulation_steps to their number, or "
                'tiering.update_schedule to "deferred"'
            )
        self._step.counter.boundary = is_boundary

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Add up the gradients of the backward passes in this context. Call `step()` after it.

        Gradients are reduced over the ranks in every pass, so this saves no communication.

        Raises:
            InfinityError: no memory is reserved for the gradients of several passes under this configuration; or
                `step()` was called inside the context.
        """
        if not self._runtime.sizing.rules.grads.holds_all:
            raise InfinityError(
                "coalesce_grad_reduction adds up the gradients of several backward passes, for which nothing is "
                'reserved: set tiering.update_schedule to "deferred"'
            )
        steps = self._step.counter.counts.global_steps
        yield
        if self._step.counter.counts.global_steps != steps:
            raise InfinityError("step() inside coalesce_grad_reduction: call it after the context")

    # Gradients #

    def gradients_wait(self, what: str) -> bool:
        """Whether some gradients are not reduced over the ranks yet. All ranks call this together.

        Args:
            what: name of the caller, for messages.
        """
        self._step.check()
        self._runtime.together(what)
        source = self._step.gradients.source
        return source.groups.all.any(source.has_unreduced)

    def waiting_gradient(self, place: Place) -> torch.Tensor | None:
        """Return a flat copy of a gradient that is not reduced yet: the sum over all ranks; None if there is none.

        Inside `no_sync` it is the gradient of this rank alone, scaled as if there were no other ranks.
        """
        step, row = self._step, self._runtime.row(place.unit)
        if place.index in row.total.present:  # another part of the gradient is already reduced
            step.gradients.check_reduced()
        found = step.gradients.source.collected_gradient(row, place.index, of_all=step.counter.synchronises)
        return found if found is None or step.counter.synchronises else found * step.losses.ranks_count

    def local_gradients(self, place: Place, what: str) -> torch.Tensor | None:
        """Return this rank's part of a unit's gradients in host memory; None if the parameter has no gradient.

        Args:
            what: name of the caller, for messages.
        """
        self._step.check()
        if self._step.updates.under_way:
            raise InfinityError(
                f'{what} after the last backward pass of a step: under tiering.update_schedule "backward" gradients '
                'are used as they come; set the schedule to "deferred"'
            )
        gradients = self._step.gradients
        self._runtime.together(what)
        gradients.check_reduced()  # otherwise None would be returned for a gradient that is not reduced yet
        self._step.updates.roll_back()
        row = self._runtime.row(place.unit)
        return self._step.updates.local_gradients(row) if place.index in row.total.present else None

    def gradients_changed(self, place: Place) -> None:
        """Measure the norm of a unit's gradients again, after the result of `local_gradients` was written to."""
        self._step.updates.remeasure(self._runtime.row(place.unit))
