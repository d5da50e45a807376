"""The loss scale of fp16 training: what keeps small gradients from vanishing and large ones from overflowing.

[Note: dynamic scale]
Micikevicius et al., arXiv 1710.03740, section 3.2. A step whose gradients are not finite is skipped and the scale is
halved; after `window` steps in a row that were, the next one that is doubles it. `hysteresis` - 1 such steps are
forgiven before the scale falls, and forgiveness is renewed when it rises (`consecutive_hysteresis`: at every finite
step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.config import Fp16Config
from infinity.errors import NonFiniteError

_FACTOR = 2.0


@dataclass
class LossScale:
    """A factor on the loss, static or dynamic; see [Note: dynamic scale].

    Attributes:
        value: the factor now.
        overflow: the gradients of the last step were not finite, and the step was left out.
        needed: losses must be scaled, as fp16 training demands.
    """

    value: float
    dynamic: bool
    window: int
    hysteresis: int
    minimum: float
    consecutive: bool = False
    overflow: bool = False
    needed: bool = True
    _step: int = 0
    _last_overflow: int = -1
    _forgiven: int = 0

    @classmethod
    def of(cls, config: Fp16Config | None) -> LossScale:
        """The scale that a configuration asks for; 1 for ever without fp16."""
        if config is None:
            return cls(1.0, dynamic=False, window=1, hysteresis=1, minimum=1.0, needed=False)
        dynamic = config.loss_scale == 0.0
        value = _FACTOR**config.initial_scale_power if dynamic else config.loss_scale
        return cls(
            value,
            dynamic,
            config.loss_scale_window,
            config.hysteresis,
            config.min_loss_scale,
            config.consecutive_hysteresis,
        )

    # Under the names that training scripts read #

    @property
    def loss_scale(self) -> float:
        """The factor now."""
        return self.value

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """It follows the gradients."""
        return self.dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Losses must be scaled."""
        return self.needed

    @property
    def cur_iter(self) -> int:
        """Steps so far, those that were left out included; counted where the scale is dynamic."""
        return self._step

    @property
    def scale_window(self) -> int:
        """Finite steps in a row after which the next one doubles the scale."""
        return self.window

    @property
    def scale_factor(self) -> float:
        """By which it rises and falls."""
        return _FACTOR

    @property
    def min_scale(self) -> float:
        """It falls no lower."""
        return self.minimum

    min_loss_scale = min_scale

    @property
    def delayed_shift(self) -> int:
        """Steps that are not finite at which it falls; those before are left out only."""
        return self.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """Of them, how many are left."""
        return self.hysteresis - self._forgiven

    @property
    def last_overflow_iter(self) -> int:
        """The last step that was left out, counted from 0; -1 for none."""
        return self._last_overflow

    def after_step(self, *, overflow: bool) -> None:
        """Settle the scale for the next step.

        Raises:
            NonFiniteError: gradients overflow although the scale is at its minimum already.
        """
        self.overflow = overflow
        if not self.dynamic:
            return
        if overflow:
            self._last_overflow = self._step
            if self._forgiven < self.hysteresis - 1:
                self._forgiven += 1
            elif self.value <= self.minimum:
                raise NonFiniteError(
                    f"gradients are not finite although the loss scale is at its minimum of {self.minimum:g}: the "
                    "model has diverged. Resume from the last checkpoint with a lower learning rate, or use bf16"
                )
            else:
                self.value = max(self.value / _FACTOR, self.minimum)
        else:
            finite = self._step - self._last_overflow - 1  # steps in a row before this one
            rises = finite > 0 and finite % self.window == 0
            if rises or self.consecutive:
                self._forgiven = 0
            if rises:
                self.value *= _FACTOR
        self._step += 1

    def state_dict(self) -> dict[str, float]:
        """Where the scale is; how it moves comes from the configuration."""
        return {
            "value": self.value,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "forgiven": self._forgiven,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there, unless this run's scale is static."""
        if self.dynamic:
            self.value = float(state["value"])
            self._step = int(state["step"])
            self._last_overflow = int(state["last_overflow"])
            self._forgiven = int(state["forgiven"])
