"""What a backward pass begins with.

[Note: one loss of several engines]
A loss may lead through the models of several engines, and one of them scales it, or the user scales it with one. To the
others the gradients that come are scaled already. So the scaled loss says in its own backward pass, by that pass's
number, what it was scaled by; an engine that did not scale it looks there before it makes a share of a gradient. By
then all losses that the gradient comes from have said so.
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
from infinity.tiers import Norms
from infinity.zero.landing import Coming
from infinity.zero.ranks import Ranks


class _Scale(NamedTuple):
    """What a loss was multiplied by.

    Attributes:
        fp16: with a loss scale among it, so that no small gradient is gone.
    """

    factor: float
    fp16: bool


_scaled: deque[tuple[int, _Scale]] = deque(maxlen=64)  # by the number of the backward pass, newest last


def _tell_scale(scale: _Scale, grad: torch.Tensor) -> None:
    _scaled.append((running_pass(), scale))


def running_pass() -> int:
    """The number of the backward pass that this thread is in."""
    return torch._C._current_graph_task_id()


class Losses:
    """The losses of a step's micro-batches.

    Attributes:
        count: losses of all ranks whose mean is the step's; of one rank, where the ranks' gradients are summed.
        ranks_count: ranks among whose losses it is.
        loss_scale: of fp16 training; its `value` is 1 otherwise.
        scaled: the user has scaled the loss whose backward comes.

    Args:
        norms: of the last loss, where the device measures it.
        early: units are updated before all gradients of a step are known.
        keeps: add the losses of a step up, for `take_sum`.
        keeps_cheap: the same, where nobody has to wait for a device to know it.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        counters: Counters,
        norms: Norms,
        *,
        early: bool,
        keeps: bool = False,
        keeps_cheap: bool = False,
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
        self._coming: tuple[int, Coming] | None = None  # the step whose loss is measured

    def scale(self, loss: torch.Tensor, *, whole_step: bool = False) -> torch.Tensor:
        """What the backward of a micro-batch's loss begins with: its share of the step's, times the loss scale.

        Args:
            whole_step: the loss is its share of this rank's step already.
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
        """The mean of this rank's losses of the step that has ended, and none from here on; None if none were seen."""
        total, self._sum = self._sum, None
        return None if total is None else float(total.item())

    def forget_sum(self) -> None:
        """What the step has had so far is dropped."""
        self._sum = None

    def check(self, loss: torch.Tensor, step: int, *, late: bool) -> None:
        """See that the loss of every rank is a number, unless the step can be left out when its gradients are none.

        Args:
            step: that the loss is of, for messages.
            late: nothing would be lost if that were known only in `check_late`.

        Raises:
            NonFiniteError: it is not.
        """
        self._coming = None
        if not self._early:
            return
        if late and self._norms and not loss.is_cpu:
            self._coming = step, Coming(self._norms.values[0], self._norms.bring(0, loss.detach()))
        elif not self._agreed(bool(torch.isfinite(loss).all())):
            raise _not_finite(step, str(loss.item()))

    def check_late(self) -> None:
        """Before anything is changed by the loss whose backward is running: as `check`, if the device says so now."""
        if self._coming is None:
            return
        (step, coming), self._coming = self._coming, None
        if not self._agreed(coming.stats(self._counters).finite):
            raise _not_finite(step, "not finite")

    def forget(self) -> None:
        """The pass is given up."""
        self.scaled = False
        self._coming = None

    def _agreed(self, finite: bool) -> bool:
        if self._ranks.size == 1:
            return finite
        with self._counters.stalled(StallCause.COLLECTIVE):
            return not self._ranks.any(not finite)

    def share_out(self, grad: torch.Tensor | None, backward_pass: int) -> None:
        """Make of a gradient, in place, what it were if the loss had been scaled here.

        Args:
            backward_pass: that it comes from, by its number.

        Raises:
            UnscaledLossError: in fp16, where small gradients are gone by now.
            InfinityError: it comes from losses that other engines have scaled in different ways.
        """
        if self.scaled:
            return
        others = {scale for number, scale in list(_scaled) if number == backward_pass}
        if len(others) > 1:
            told = ", ".join(f"{scale.factor:g}" for scale in sorted(others))
            raise InfinityError(
                f"one backward pass goes through losses that other engines have scaled by different numbers ({told}), "
                "so that this engine's gradients have no one scale: scale all of them with one engine, or have all "
                "engines accumulate the same number of micro-batches"
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
