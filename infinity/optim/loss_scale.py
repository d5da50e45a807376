"""The loss scale of fp16 training, which prevents underflow of small gradients and overflow of large ones.

[Note: dynamic scale]
Micikevicius et al., arXiv 1710.03740, section 3.2. A step with gradients that are not finite is skipped, and the scale
is halved. After `window` consecutive finite steps, the next finite step doubles it. `hysteresis` - 1 overflows are
skipped before the scale falls. The count starts again when the scale rises (with `consecutive_hysteresis`: at every
finite step).
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
        overflow: the gradients of the last step were not finite, and the step was skipped.
        needed: whether losses must be scaled, as in fp16 training.
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
        """Return the scale of a configuration; it is always 1 without fp16."""
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
        """Whether the scale depends on the gradients."""
        return self.dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether losses must be scaled."""
        return self.needed

    @property
    def cur_iter(self) -> int:
        """Number of steps, including skipped ones, if the scale is dynamic."""
        return self._step

    @property
    def scale_window(self) -> int:
        """Number of consecutive finite steps after which the next one doubles the scale."""
        return self.window

    @property
    def scale_factor(self) -> float:
        """Factor of a rise or fall."""
        return _FACTOR

    @property
    def min_scale(self) -> float:
        """Lower bound of a dynamic scale."""
        return self.minimum

    min_loss_scale = min_scale

    @property
    def delayed_shift(self) -> int:
        """Number of overflows at which the scale falls; the overflows before are only skipped."""
        return self.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """How many of these overflows are left."""
        return self.hysteresis - self._forgiven

    @property
    def last_overflow_iter(self) -> int:
        """The last skipped step, counted from 0; -1 for none."""
        return self._last_overflow

    def after_step(self, *, overflow: bool) -> None:
        """Set the scale for the next step.

        Raises:
            NonFiniteError: gradients overflow although the scale is at its minimum.
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
            finite = self._step - self._last_overflow - 1  # consecutive finite steps before this one
            rises = finite > 0 and finite % self.window == 0
            if rises or self.consecutive:
                self._forgiven = 0
            if rises:
                self.value *= _FACTOR
        self._step += 1

    def state_dict(self) -> dict[str, float]:
        """Return the state of the scale; its parameters come from the configuration."""
        return {
            "value": self.value,
            "step": self._step,
            "last_overflow": self._last_overflow,
            "forgiven": self._forgiven,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state, unless this run's scale is static."""
        if self.dynamic:
            self.value = float(state["value"])
            self._step = int(state["step"])
            self._last_overflow = int(state["last_overflow"])
            self._forgiven = int(state["forgiven"])
