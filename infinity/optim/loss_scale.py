"""The loss scale of fp16 training, which prevents underflow of small gradients and overflow of large ones.

[Note: dynamic scale]
See Micikevicius et al., arXiv 1710.03740, section 3.2. A step with gradients that are not finite is skipped, and the
scale is halved. After `window` consecutive finite steps, the next finite step doubles the scale. The first
`hysteresis` - 1 overflows only skip their step and do not halve the scale. Their count starts again when the scale
rises (with `consecutive_hysteresis`: at every finite step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from infinity.config import Fp16Config
from infinity.errors import NonFiniteError


@dataclass
class LossScale:
    """A factor on the loss, static or dynamic; see [Note: dynamic scale]. Training scripts read these names.

    Attributes:
        value: the current factor.
        scale_window: number of consecutive finite steps after which the next one doubles the scale.
        delayed_shift: number of overflows after which the scale falls; earlier overflows only skip their step.
        min_scale: lower bound of a dynamic scale.
        overflow: whether the last step was skipped, because its gradients were not finite.
        needed: whether losses must be scaled, as in fp16 training.
        cur_iter: number of steps, including skipped ones, if the scale is dynamic.
        last_overflow_iter: the last skipped step, counted from 0; -1 for none.
        scale_factor: factor by which the scale rises or falls.
    """

    value: float
    dynamic: bool
    scale_window: int
    delayed_shift: int
    min_scale: float
    consecutive: bool = False
    overflow: bool = False
    needed: bool = True
    cur_iter: int = 0
    last_overflow_iter: int = -1
    _forgiven: int = 0

    scale_factor: ClassVar[float] = 2.0

    @classmethod
    def of(cls, config: Fp16Config | None) -> LossScale:
        """Return the scale of a configuration; it is always 1 without fp16."""
        if config is None:
            return cls(1.0, dynamic=False, scale_window=1, delayed_shift=1, min_scale=1.0, needed=False)
        dynamic = config.loss_scale == 0.0
        return cls(
            cls.scale_factor**config.initial_scale_power if dynamic else config.loss_scale,
            dynamic,
            config.loss_scale_window,
            config.hysteresis,
            config.min_loss_scale,
            config.consecutive_hysteresis,
        )

    @property
    def loss_scale(self) -> float:
        """The current factor."""
        return self.value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale depends on the gradients."""
        return self.dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether losses must be scaled."""
        return self.needed

    @property
    def min_loss_scale(self) -> float:
        """Same as `min_scale`."""
        return self.min_scale

    @property
    def cur_hysteresis(self) -> int:
        """Number of overflows until the scale falls."""
        return self.delayed_shift - self._forgiven

    def after_step(self, *, overflow: bool) -> None:
        """Set the scale for the next step.

        Raises:
            NonFiniteError: gradients overflow although the scale is at its minimum.
        """
        self.overflow = overflow
        if not self.dynamic:
            return
        if overflow:
            self.last_overflow_iter = self.cur_iter
            if self._forgiven < self.delayed_shift - 1:
                self._forgiven += 1
            elif self.value <= self.min_scale:
                raise NonFiniteError(
                    f"gradients are not finite although the loss scale is at its minimum of {self.min_scale:g}: the "
                    "model has diverged. Resume from the last checkpoint with a lower learning rate, or use bf16"
                )
            else:
                self.value = max(self.value / self.scale_factor, self.min_scale)
        else:
            finite = self.cur_iter - self.last_overflow_iter - 1  # consecutive finite steps before this one
            rises = finite > 0 and finite % self.scale_window == 0
            if rises or self.consecutive:
                self._forgiven = 0
            if rises:
                self.value *= self.scale_factor
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float]:
        """Return the state of the scale. Its settings are not included: they come from the configuration."""
        return {
            "value": self.value,
            "step": self.cur_iter,
            "last_overflow": self.last_overflow_iter,
            "forgiven": self._forgiven,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state, unless this run's scale is static."""
        if self.dynamic:
            self.value = float(state["value"])
            self.cur_iter = int(state["step"])
            self.last_overflow_iter = int(state["last_overflow"])
            self._forgiven = int(state["forgiven"])
