"""Update rules and their numbers.

All arithmetic is in fp32, in the order of torch's own optimizers; `g` is the gradient times `grad_scale`.

    Adam      g += weight_decay * p  (coupled)   or   p *= 1 - lr * weight_decay  (decoupled: AdamW)
              m += (1 - beta1) * (g - m);   v = beta2 * v + (1 - beta2) * g * g
              p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
    Adagrad   g += weight_decay * p;   s += g * g;   p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)
    Lion      p *= 1 - lr * weight_decay;   p -= lr * sign(beta1 * m + (1 - beta1) * g)
              m = beta2 * m + (1 - beta2) * g
    SGD       g += weight_decay * p;   m = momentum * m + g;   p -= lr * m   (Nesterov: lr * (g + momentum * m))

Sources: Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Duchi et al., JMLR 12 (2011);
Chen et al., arXiv 2302.06675.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Protocol


class Loop(Enum):
    """The arithmetic of a rule; Adam's coupled decay is a separate loop."""

    ADAMW = auto()
    ADAM = auto()
    ADAGRAD = auto()
    LION = auto()
    SGD = auto()


@dataclass(frozen=True)
class Numbers:
    """The factors of a loop, see csrc/adam/kernels.h. Rounded to float32 before use."""

    grad_scale: float
    step_size: float
    param_factor: float = 1.0
    l2: float = 0.0
    m_factor: float = 0.0
    m_weight: float = 0.0
    v_factor: float = 0.0
    v_weight: float = 0.0
    blend: float = 0.0
    inv_bias2: float = 1.0
    eps: float = 0.0


class Rule(Protocol):
    """The numbers of one update of one rule.

    Attributes:
        first: name of its signed moment, or None.
        second: name of its moment that is never negative, or None.
        step: number of this update of these elements, from 1.
        grad_scale: factor on the gradient: 1 / loss scale x clip coefficient.
    """

    first: ClassVar[str | None]
    second: ClassVar[str | None]

    @property
    def step(self) -> int: ...

    @property
    def grad_scale(self) -> float: ...

    def loop(self) -> tuple[Loop, Numbers]:
        """Return the loop to run, and its factors."""
        ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Hyper:
    """One update of AdamW, or of Adam.

    Attributes:
        step: number of this update of these elements, from 1.
        decoupled: use AdamW's weight decay; if False Adam's, which is added to the gradient.
        grad_scale: factor on the gradient: 1 / loss scale x clip coefficient.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool
    grad_scale: float = 1.0

    first: ClassVar[str | None] = "exp_avg"
    second: ClassVar[str | None] = "exp_avg_sq"

    def loop(self) -> tuple[Loop, Numbers]:
        coupled = not self.decoupled and self.weight_decay != 0.0
        numbers = Numbers(
            grad_scale=self.grad_scale,
            param_factor=1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=self.weight_decay if coupled else 0.0,
            step_size=-self.lr / (1.0 - self.beta1**self.step),
            m_weight=1.0 - self.beta1,
            v_factor=self.beta2,
            v_weight=1.0 - self.beta2,
            inv_bias2=1.0 / math.sqrt(1.0 - self.beta2**self.step),
            eps=self.eps,
        )
        return (Loop.ADAM if coupled else Loop.ADAMW), numbers


@dataclass(frozen=True)
class AdagradHyper:
    """One update of Adagrad."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    first: ClassVar[str | None] = None
    second: ClassVar[str | None] = "sum"

    def loop(self) -> tuple[Loop, Numbers]:
        step_size = -self.lr / (1.0 + (self.step - 1) * self.lr_decay)
        numbers = Numbers(grad_scale=self.grad_scale, l2=self.weight_decay, step_size=step_size, eps=self.eps)
        return Loop.ADAGRAD, numbers


@dataclass(frozen=True)
class LionHyper:
    """One update of Lion."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    first: ClassVar[str | None] = "exp_avg"
    second: ClassVar[str | None] = None

    def loop(self) -> tuple[Loop, Numbers]:
        numbers = Numbers(
            grad_scale=self.grad_scale,
            param_factor=1.0 - self.lr * self.weight_decay,
            step_size=-self.lr,
            m_factor=self.beta2,
            m_weight=1.0 - self.beta2,
            blend=1.0 - self.beta1,
        )
        return Loop.LION, numbers


@dataclass(frozen=True)
class SgdHyper:
    """One update of SGD with momentum."""

    lr: float
    momentum: float
    weight_decay: float
    step: int
    nesterov: bool = False
    grad_scale: float = 1.0

    first: ClassVar[str | None] = "momentum_buffer"
    second: ClassVar[str | None] = None

    def loop(self) -> tuple[Loop, Numbers]:
        numbers = Numbers(
            grad_scale=self.grad_scale,
            l2=self.weight_decay,
            step_size=-self.lr,
            m_factor=self.momentum,
            m_weight=1.0,
            blend=float(self.nesterov),
        )
        return Loop.SGD, numbers
