"""Predict whether speculative updates will be committed."""

from __future__ import annotations

_MOST_QUIET = 64


class Foresight:
    """Expect that speculative updates will be committed if the last steps were *quiet*: neither clipped nor skipped.

    A rollback costs about as much as the update would have saved. So updates are speculative after a required number of
    quiet steps. A step with a rollback doubles that number; a step whose speculative updates are committed halves it.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._required = 1
        self._speculated = False

    @property
    def speculates(self) -> bool:
        """Whether updates of the next step may be speculative."""
        return self._quiet >= self._required

    def speculated(self) -> None:
        """Record that an update of this step is speculative."""
        self._speculated = True

    def after_step(self, *, quiet: bool) -> None:
        """End a step.

        Args:
            quiet: whether its gradients were used unchanged: not clipped, and the step not skipped.
        """
        if not quiet:
            self.rolled_back()
            return
        self._quiet += 1
        if self._speculated:
            self._required = max(1, self._required // 2)
        self._speculated = False

    def rolled_back(self) -> None:
        """Record that speculative updates were rolled back, or would have been."""
        self._quiet = 0
        if self._speculated:
            self._required = min(_MOST_QUIET, 2 * self._required)
        self._speculated = False
