"""Whether updates may run ahead of the norm that decides on them."""

from __future__ import annotations

_MOST_QUIET = 64


class Foresight:
    """Expects of the next step what the last ones were like: that its gradients are used as they are, or not.

    An update that is undone costs about what it was to save. So updates run ahead after a few *quiet* steps, which
    neither clipped nor skipped: twice as many after each time that this was wrong, half as many after each time that it
    was right.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._asked = 1
        self._tried = False

    @property
    def runs_ahead(self) -> bool:
        """Updates of the step that comes may run ahead."""
        return self._quiet >= self._asked

    def tried(self) -> None:
        """An update of this step runs ahead."""
        self._tried = True

    def after_step(self, *, quiet: bool) -> None:
        """A step is over.

        Args:
            quiet: its gradients were used as they came.
        """
        if not quiet:
            self.disturbed()
            return
        self._quiet += 1
        if self._tried:
            self._asked = max(1, self._asked // 2)
        self._tried = False

    def disturbed(self) -> None:
        """Updates that ran ahead were undone, or would have been."""
        self._quiet = 0
        if self._tried:
            self._asked = min(_MOST_QUIET, 2 * self._asked)
        self._tried = False
