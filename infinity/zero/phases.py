"""Where a training step is, and the table of what may follow what.

[Note: phases]
A step is IDLE, then FORWARD and BACKWARD once for each micro-batch, then UPDATE. A phase lasts until the next begins:
FORWARD is also the time between a forward pass and its backward, BACKWARD the time until the next micro-batch or the
update. An EVALUATION returns to where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Counts:
    """How far training is.

    Attributes:
        global_steps: updates so far, skipped ones included.
        micro_steps: backward passes so far.
        skipped_steps: updates that were left out because gradients were not finite.
    """

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
