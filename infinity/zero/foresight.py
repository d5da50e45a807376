"""Predict whether speculative updates will be committed."""

from __future__ import annotations

_MOST_QUIET = 64


class Foresight:
    """Expect that the next step is like the last ones: whether its gradients are used unchanged.

    A rollback costs about as much as the update would have saved. So updates are speculative after a few *quiet* steps,
    which neither clipped nor skipped. Each failure doubles that number of steps; each success halves it.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._asked = 1
        self._tried = False

    @property
    def speculates(self) -> bool:
        """Whether updates of the next step may be speculative."""
        return self._quiet >= self._asked

    def tried(self) -> None:
        """Record that an update of this step is speculative."""
        self._tried = True

    def after_step(self, *, quiet: bool) -> None:
        """End a step.

        Args:
            quiet: whether its gradients were used unchanged: not clipped, and the step not skipped.
        """
        if not quiet:
            self.disturbed()
            return
        self._quiet += 1
        if self._tried:
            self._asked = max(1, self._asked // 2)
        self._tried = False

    def disturbed(self) -> None:
        """Record that speculative updates were rolled back, or would have been."""
        self._quiet = 0
        if self._tried:
            self._asked = min(_MOST_QUIET, 2 * self._asked)
        self._tried = False
