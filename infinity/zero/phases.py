"""The phases of a training step, and the table of allowed transitions.

[Note: phases]
A step is IDLE, then FORWARD and BACKWARD once for each micro-batch, then UPDATE. A phase lasts until the next one
begins: FORWARD includes the time between a forward pass and its backward, BACKWARD the time until the next micro-batch
or the update. An EVALUATION returns to the phase before it.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """See [Note: phases]."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    EVALUATION = "evaluation"
    FAILED = "failed"
    CLOSED = "closed"


_PASSES = frozenset({Phase.IDLE, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.EVALUATION})
_ENDS = frozenset({Phase.FAILED, Phase.CLOSED})
# A dropped pass leads back to IDLE. An update without a backward pass changes no parameter.
FOLLOWS = {
    Phase.IDLE: _PASSES | _ENDS,
    Phase.FORWARD: _PASSES | _ENDS,
    Phase.BACKWARD: _PASSES | _ENDS,
    Phase.UPDATE: frozenset({Phase.IDLE}) | _ENDS,
    Phase.EVALUATION: frozenset({Phase.IDLE, Phase.FORWARD, Phase.BACKWARD}) | _ENDS,
    Phase.FAILED: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}


class Phases:
    """The phase of one step. Only the transitions in `FOLLOWS` are possible.

    Attributes:
        now: the phase.
        failure: the error behind FAILED, as text: an exception would keep its frames, so the loss, its graph and the
            engine alive, in a cycle that the garbage collector does not see.
    """

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.failure = ""

    def go(self, phase: Phase) -> None:
        if phase not in FOLLOWS[self.now]:
            raise RuntimeError(f"a step that is {self.now.value} cannot become {phase.value}")
        self.now = phase

    def fail(self, error: BaseException) -> None:
        """Change to FAILED permanently."""
        self.failure = f"{type(error).__name__}: {error}"
        self.go(Phase.FAILED)
