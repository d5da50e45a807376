"""What a backward pass begins with."""

from __future__ import annotations

import math

import torch

from infinity.config import Config
from infinity.errors import InfinityError
from infinity.optim.loss_scale import LossScale
from infinity.telemetry import Counters, StallCause
from infinity.tiers import Norms, Transfer
from infinity.zero.ranks import Ranks
from infinity.zero.updates import UpdateSchedule


class Losses:
    """The losses of a step's micro-batches.

    Attributes:
        count: losses of all ranks whose mean is the step's.
        loss_scale: of fp16 training; its `value` is 1 otherwise.
        scaled: the user has scaled the loss whose backward comes.

    Args:
        norms: of the last loss, where the device measures it.
        keeps: add the losses of a step up, for `take_sum`.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        schedule: UpdateSchedule,
        counters: Counters,
        norms: Norms,
        *,
        keeps: bool = False,
    ) -> None:
        self.count = config.gradient_accumulation_steps * ranks.size
        self._ranks_count = ranks.size
        self.loss_scale = LossScale.of(config.fp16)
        self.scaled = False
        self._keeps = keeps
        self._sum: torch.Tensor | None = None
        self._fp16 = config.fp16 is not None
        self._ranks = ranks
        self._schedule = schedule
        self._counters = counters
        self._norms = norms
        self._coming: Transfer | None = None  # whether the loss is a number

    def scale(self, loss: torch.Tensor, *, whole_step: bool = False) -> torch.Tensor:
        """What the backward of a micro-batch's loss begins with: its share of the step's, times the loss scale.

        Args:
            whole_step: the loss is its share of this rank's step already.
        """
        self.scaled = True
        if self._keeps:
            mean = loss.detach().float().mean() * (1 if whole_step else self._ranks_count / self.count)
            self._sum = mean if self._sum is None else self._sum + mean
        share = loss / (self._ranks_count if whole_step else self.count)
        return share.float() * self.loss_scale.value if self._fp16 else share

    def take_sum(self) -> float | None:
        """The mean of this rank's losses of the step that has ended, and none from here on; None if none were seen."""
        total, self._sum = self._sum, None
        return None if total is None else float(total.item())

    def forget_sum(self) -> None:
        """What the step has had so far is dropped."""
        self._sum = None

    def usable(self, loss: torch.Tensor, *, late: bool) -> bool:
        """The loss of every rank is a number, or the step can be left out when its gradients turn out to be none, or
        `was_usable` will tell.

        Args:
            late: nothing that came before would be lost if it were known only when the pass changes something.
        """
        self._coming = None
        if self._schedule is not UpdateSchedule.BACKWARD:
            return True
        if late and self._norms and not loss.is_cpu:
            self._coming = self._norms.bring(0, loss.detach())
            return True
        return self._agreed(bool(torch.isfinite(loss).all()))

    def was_usable(self) -> bool:
        """The loss whose backward is running is a number, on every rank: asked before anything is changed by it."""
        if self._coming is None:
            return True
        with self._counters.stalled(StallCause.HOST_LINK):
            self._coming.result()
        self._coming = None
        return self._agreed(math.isfinite(self._norms.values[0].item()))

    def forget(self) -> None:
        """The pass is given up."""
        self.scaled = False
        self._coming = None

    def _agreed(self, finite: bool) -> bool:
        if self._ranks.size == 1:
            return finite
        with self._counters.stalled(StallCause.COLLECTIVE):
            return not self._ranks.any(not finite)

    def share_out(self, grad: torch.Tensor | None) -> None:
        """Make of a gradient, in place, what it were if the loss had been scaled.

        Raises:
            InfinityError: in fp16, where small gradients are gone by now.
        """
        if self.scaled:
            return
        if self._fp16:
            raise InfinityError(
                "loss.backward() in fp16 training: small gradients would vanish without the loss scale. Call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        if grad is not None and self.count > 1:
            with torch.no_grad():
                grad.div_(self.count)
