"""Training steps whose passes the user does not run: layer-major micro-batches, and schedules of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from infinity.errors import InfinityError
from infinity.zero.layer_major import Forward, LayerMajor, LayerMajorPass, MicroBatch
from infinity.zero.phases import Phase
from infinity.zero.step import Step
from infinity.zero.unit import Unit

LossFn = Callable[[Any, Any], torch.Tensor]


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Call the model with a batch: a mapping of keyword arguments, a tuple or list of arguments, or one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def loss_of(outputs: Any, batch: Any, loss_fn: LossFn | None) -> torch.Tensor:
    """Return the loss of a micro-batch: by default the output itself, or its attribute `loss`.

    Raises:
        InfinityError: the result is no scalar that requires a gradient.
    """
    loss = getattr(outputs, "loss", outputs) if loss_fn is None else loss_fn(outputs, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = "the model's output" if loss_fn is None else "what loss_fn returns"
        raise InfinityError(
            f"train_batch needs a scalar loss that requires a gradient, but {what} is not one: give loss_fn"
        )
    return loss


@contextmanager
def driven(step: Step) -> Iterator[None]:
    """Run the forward and backward passes of all micro-batches of a step in this context, in any order."""
    step.begin()
    step.counter.skip_to_last()
    with step.backward(in_parts=step.all_units), step.saving():
        yield


def train_layer_major(
    step: Step, layer_major: LayerMajor, model: Callable[..., Any], batches: Sequence[Any], loss_fn: LossFn | None
) -> list[torch.Tensor]:
    """Run forward and backward of a step: all micro-batches go through a block before the next. Return the losses."""

    def forward(batch: Any) -> torch.Tensor:
        try:
            with step.saving():
                return loss_of(call(model, batch), batch, loss_fn)
        except BaseException:
            step.hooks.abandon()
            raise

    step.begin()
    step.counter.skip_to_last()
    with step.stopped_by_failures():
        try:
            losses = layer_major.run(_Pass(step, layer_major, [partial(forward, batch) for batch in batches]))
            with step.running(Phase.BACKWARD):
                step.close_backward()
        except BaseException as error:
            step.abort(error)
            raise
    return losses


class _Pass(LayerMajorPass):
    """The layer-major micro-batches of a step."""

    def __init__(self, step: Step, layer_major: LayerMajor, forwards: Sequence[Forward]) -> None:
        super().__init__(layer_major, forwards)
        self._step = step
        self._begun = False

    def _forward(self, micro_batch: MicroBatch) -> None:
        if self._step.activations is not None:
            self._step.activations.take_turn(self.running, micro_batch.index)
        with self._step.running(Phase.FORWARD):
            micro_batch.resume()

    def _start(self, micro_batch: MicroBatch) -> None:
        loss = self._take_loss(micro_batch)
        with self._step.running(Phase.BACKWARD):
            self._step.check_finite(loss)
            if not self._begun:
                self._step.open_backward(frozenset())
                self._begun = True
            self._piece([self._step.losses.scale(loss)], None)

    def _go_on(self, micro_batch: MicroBatch, round_index: int) -> None:
        tensors, grads = micro_batch.cuts.take(round_index)
        if tensors:
            with self._step.running(Phase.BACKWARD):
                self._piece(tensors, grads)

    def _piece(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor] | None) -> None:
        torch.autograd.backward(tensors, grads)
        self._step.hooks.end_backward()

    def _complete(self, units: Sequence[Unit]) -> None:
        step = self._step
        with step.running(Phase.BACKWARD):
            for unit in sorted(units, key=lambda unit: unit.index, reverse=True):
                for addend in step.gradients.source.complete(unit):
                    step.updates.add(addend)
                if unit.total.step is not None:
                    step.updates.gradients_final(unit)
                    step.updates.pause(unit)
