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


_ALL = frozenset(Phase)
_ENDS = frozenset({Phase.FAILED, Phase.CLOSED})
# A dropped pass leads back to IDLE. An update without a backward pass changes no parameter.
FOLLOWS = {
    Phase.IDLE: _ALL,
    Phase.FORWARD: _ALL,
    Phase.BACKWARD: _ALL,
    Phase.UPDATE: frozenset({Phase.IDLE}) | _ENDS,
    Phase.EVALUATION: frozenset({Phase.IDLE, Phase.FORWARD, Phase.BACKWARD}) | _ENDS,
    Phase.FAILED: frozenset({Phase.CLOSED}),
    Phase.CLOSED: frozenset(),
}
