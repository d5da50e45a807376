"""Scale the losses from which backward passes start.

[Note: one loss of several engines]
A loss may depend on the models of several engines. Only one of these engines scales it, in `backward` or `scale`; the
others get gradients that are already scaled. So a hook on the scaled loss records its scale when the backward pass
begins there, under the number of the pass. An engine that did not scale the loss reads these records before it scales a
gradient. At that time, the hooks of all losses that the gradient comes from have run.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import torch

from infinity.config import Config
from infinity.errors import InfinityError, NonFiniteError, UnscaledLossError
from infinity.optim.loss_scale import LossScale
from infinity.telemetry import Counters, StallCause
from infinity.tiers.norms import ArrivingStats, Norms
from infinity.zero.ranks import Ranks


class _Scale(NamedTuple):
    """The factor on a loss.

    Attributes:
        fp16: whether the factor includes a loss scale, which keeps small gradients from becoming zero.
    """

    factor: float
    fp16: bool


_scaled: deque[tuple[int, _Scale]] = deque(maxlen=64)  # by number of the backward pass, newest last


def _tell_scale(scale: _Scale, grad: torch.Tensor) -> None:
    _scaled.append((running_pass(), scale))


def running_pass() -> int:
    """Return the number of this thread's backward pass."""
    return torch._C._current_graph_task_id()


class Losses:
    """The losses of a step's micro-batches.

    Attributes:
        count: the number that each loss is divided by: the micro-batches of a step on all ranks, or on one rank if the
            ranks' gradients are summed and not averaged.
        ranks_count: the ranks' part of `count`.
        loss_scale: of fp16 training; its `value` is 1 otherwise.
        scaled: whether `scale` was called for the loss whose backward pass comes next.

    Args:
        norms: measures on the device whether a loss is finite; falsy without a device.
        early: whether units are updated before all gradients of a step are known.
        keeps: whether to sum up the losses of a step, for `take_sum`.
        keeps_cheap: whether to do so for losses in host memory, which need no wait for a device.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        counters: Counters,
        norms: Norms,
        *,
        early: bool,
        keeps: bool,
        keeps_cheap: bool,
    ) -> None:
        self.ranks_count = 1 if config.sums_ranks else ranks.size
        self.count = config.gradient_accumulation_steps * self.ranks_count
        self.loss_scale = LossScale.of(config.fp16)
        self.scaled = False
        self._keeps = keeps
        self._keeps_cheap = keeps_cheap
        self._sum: torch.Tensor | None = None
        self._fp16 = config.fp16 is not None
        self._ranks = ranks
        self._early = early
        self._counters = counters
        self._norms = norms
        self._coming: tuple[int, ArrivingStats] | None = None  # the step whose loss is being measured

    def scale(self, loss: torch.Tensor, *, whole_step: bool = False) -> torch.Tensor:
        """Return the tensor to call `backward()` on: the loss divided by `count`, and in fp16 times the loss scale.

        Args:
            whole_step: whether the loss is already divided by the gradient accumulation steps.
        """
        self.scaled = True
        if (self._keeps or (self._keeps_cheap and loss.is_cpu)) and type(loss) is torch.Tensor:
            mean = loss.detach().float().mean() * (1 if whole_step else self.ranks_count / self.count)
            self._sum = mean if self._sum is None else self._sum + mean
        share = loss / (self.ranks_count if whole_step else self.count)
        scaled = share.float() * self.loss_scale.value if self._fp16 else share
        if scaled.requires_grad:
            scaled.register_hook(partial(_tell_scale, self._scale))
        return scaled

    @property
    def _scale(self) -> _Scale:
        return _Scale(self.loss_scale.value / self.count, self._fp16)

    def take_sum(self) -> float | None:
        """Return the mean of this rank's losses of the finished step, and reset it; None if there were none."""
        total, self._sum = self._sum, None
        return None if total is None else float(total.item())

    def forget_sum(self) -> None:
        """Drop the step's losses so far."""
        self._sum = None

    def check(self, loss: torch.Tensor, step: int, *, late: bool) -> None:
        """Check that the loss of every rank is finite, if units are updated before all gradients are known.

        Args:
            step: for messages.
            late: whether a loss on the device may be checked later, by `check_late`.

        Raises:
            NonFiniteError: the loss of a rank is not finite.
        """
        self._coming = None
        if not self._early:
            return
        if late and self._norms and not loss.is_cpu:
            self._coming = step, self._norms.bring(0, loss.detach())
        elif not self._agreed(bool(torch.isfinite(loss).all())):
            raise _not_finite(step, str(loss.item()))

    def check_late(self) -> None:
        """Finish a `check` of a loss on the device, before the backward pass changes any parameter."""
        if self._coming is None:
            return
        (step, coming), self._coming = self._coming, None
        if not self._agreed(coming.stats(self._counters).finite):
            raise _not_finite(step, "not finite")

    def forget(self) -> None:
        """Forget the loss of an aborted pass."""
        self.scaled = False
        self._coming = None

    def _agreed(self, finite: bool) -> bool:
        if self._ranks.size == 1:
            return finite
        with self._counters.stalled(StallCause.COLLECTIVE):
            return not self._ranks.any(not finite)

    def scale_gradient(self, grad: torch.Tensor | None, backward_pass: int) -> None:
        """Scale a gradient in place as if the loss had been scaled here.

        Args:
            backward_pass: number of the pass that computed the gradient.

        Raises:
            UnscaledLossError: fp16 training needs a scaled loss, and no engine has scaled it.
            InfinityError: the gradient comes from losses that other engines have scaled by different factors.
        """
        if self.scaled:
            return
        others = {scale for number, scale in list(_scaled) if number == backward_pass}
        if len(others) > 1:
            told = ", ".join(f"{scale.factor:g}" for scale in sorted(others))
            raise InfinityError(
                f"one backward pass goes through losses that other engines have scaled by different numbers ({told}), "
                "so this engine's gradients do not have one scale: scale all of the losses with one engine, or set the "
                "same gradient_accumulation_steps for all engines"
            )
        other = next(iter(others), None)
        if self._fp16 and (other is None or not other.fp16):
            raise UnscaledLossError(
                "loss.backward() in fp16 training. Loss scaling is required, since small gradients would vanish "
                "without it: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if grad is None:
            return
        with torch.no_grad():
            if other is None:
                grad.div_(self.count)
            elif other.factor != self._scale.factor:
                grad.mul_(self._scale.factor / other.factor)


def _not_finite(step: int, found: str) -> NonFiniteError:
    return NonFiniteError(
        f"the loss of step {step} is {found}; no parameter was changed by it. Leave this batch out, or set "
        "tiering.update_schedule to deferred to have such steps skipped"
    )
