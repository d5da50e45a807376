"""Count steps, and decide which micro-batch ends a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from infinity.errors import InfinityError


@dataclass(frozen=True)
class Counts:
    """The progress of training.

    Attributes:
        global_steps: updates so far, including skipped ones.
        micro_steps: backward passes so far.
        skipped_steps: updates that were skipped because gradients were not finite.
    """

    global_steps: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0


class StepCounter:
    """Count steps and micro-batches. Each method changes the counts by one assignment, see [Note: interrupts] in
    step.py.

    Args:
        per_step: micro-batches of a step.
        counts_boundaries: every `per_step`-th micro-batch ends a step, unless the user says otherwise.

    Attributes:
        counts: after the last micro-batch, or the last step.
        boundary: whether the next micro-batch ends its step, if the user has set it; None to count.
        whole: one call runs all micro-batches of the step, so none of them counts if it fails.
    """

    def __init__(self, per_step: int, *, counts_boundaries: bool) -> None:
        self.counts = Counts()
        self.boundary: bool | None = None if counts_boundaries else True
        self.whole = False
        self.synchronises = True
        self._per_step = per_step
        self._to_run_again = 0  # micro-batches before a failed backward pass

    @property
    def ends_step(self) -> bool:
        """Whether the next micro-batch is the last one of its step."""
        counted = self._position == self._per_step - 1
        return self.synchronises and (counted if self.boundary is None else self.boundary)

    @property
    def is_whole_step(self) -> bool:
        """Whether every micro-batch is a step by itself."""
        return self._per_step == 1 and self.boundary is None

    @property
    def _position(self) -> int:
        return self.counts.micro_steps % self._per_step

    def skip_to_last(self) -> None:
        """Count all micro-batches of the step except the last, because they run together."""
        self.counts = replace(self.counts, micro_steps=self.counts.micro_steps + self._per_step - 1)

    def after_micro_batch(self) -> Counts:
        """Return the counts after the running micro-batch."""
        micro_steps = self.counts.micro_steps + 1
        if self.boundary:  # the user may end a step early: round up to whole steps
            micro_steps += -micro_steps % self._per_step
        return replace(self.counts, micro_steps=micro_steps)

    def backward_begins(self) -> None:
        """Note that the step runs again, if its last backward pass failed."""
        self._to_run_again = 0

    def begin_step_again(self) -> int:
        """Uncount the step's earlier micro-batches after a failed backward pass. Return their number."""
        earlier = self._position
        self.counts = replace(self.counts, micro_steps=self.counts.micro_steps - earlier)
        self._to_run_again += earlier
        return earlier

    def leave_out(self) -> None:
        """End the step, whose gradients were dropped, where it would have ended. Its micro-batches do not run again."""
        uncounted, self._to_run_again = self._to_run_again, 0
        if self.whole:
            uncounted, self.whole = -self._position, False
        self.counts = replace(self.counts, micro_steps=self.counts.micro_steps + uncounted)

    @contextmanager
    def unsynchronised(self) -> Iterator[None]:
        """Within the context, no backward pass is the last one of a step."""
        if not self.synchronises:
            raise InfinityError("no_sync is inside another no_sync already")
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True
