"""Where a training step is, and the table of what may follow what.

[Note: phases]
A step is IDLE, then FORWARD and BACKWARD once for each micro-batch, then UPDATE. A phase lasts until the next begins:
FORWARD is also the time between a forward pass and its backward, BACKWARD the time until the next micro-batch or the
update. An EVALUATION returns to where it came from.
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
# A pass that is dropped leads back to IDLE. An update without a backward pass changes nothing.
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
    """The phase of one step; only transitions of `FOLLOWS` are possible.

    Attributes:
        now: the phase.
        failure: why it is FAILED. In words, since an exception leads to its frames, these to the loss, and its graph to
            the engine: a circle that the garbage collector does not see.
    """

    def __init__(self) -> None:
        self.now = Phase.IDLE
        self.failure = ""

    def go(self, phase: Phase) -> None:
        """Change to the phase."""
        if phase not in FOLLOWS[self.now]:
            raise RuntimeError(f"a step that is {self.now.value} cannot become {phase.value}")
        self.now = phase

    def fail(self, error: BaseException) -> None:
        """Change to FAILED for good."""
        self.failure = f"{type(error).__name__}: {error}"
        self.go(Phase.FAILED)
