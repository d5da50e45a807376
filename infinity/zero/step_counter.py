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
        micro_steps: micro-batches so far: calls of `step()`, or backward passes if every `step()` ends a step.
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
        counts_boundaries: every `per_step`-th micro-batch ends a step, unless the user says otherwise. If false, every
            `step()` ends one, after any number of backward passes.

    Attributes:
        counts: after the last micro-batch, or the last step.
        boundary: whether the next micro-batch ends its step, if the user has set it; None to count.
        runs_in_one_call: whether one call runs all micro-batches of the step, so that none of them counts if it fails.
    """

    def __init__(self, per_step: int, *, counts_boundaries: bool) -> None:
        self.counts = Counts()
        self.boundary: bool | None = None if counts_boundaries else True
        self.runs_in_one_call = False
        self.synchronises = True
        self._per_step = per_step if counts_boundaries else 1
        self._counts_passes = not counts_boundaries
        self._passes = (self.counts, 0)  # backward passes since the counts were these
        self._to_run_again = 0  # micro-batches before a failed backward pass

    @property
    def ends_step(self) -> bool:
        """Whether the next micro-batch is the last one of its step."""
        counted = self.position == self._per_step - 1
        return self.synchronises and (counted if self.boundary is None else self.boundary)

    @property
    def single_pass(self) -> bool:
        """Whether each step has one backward pass, because every micro-batch is a step by itself."""
        return self._per_step == 1 and self.boundary is None

    @property
    def position(self) -> int:
        """Micro-batches of the step that are counted; always 0 if every `step()` ends a step."""
        return self.counts.micro_steps % self._per_step

    @property
    def _uncounted_passes(self) -> int:
        since, passes = self._passes
        return passes if since == self.counts else 0

    def resume(self, counts: Counts) -> None:
        """Continue from the counts of a checkpoint, which may be of another number of micro-batches a step."""
        self._passes = (counts, 0)
        self.counts = replace(counts, micro_steps=counts.micro_steps + -counts.micro_steps % self._per_step)

    def skip_to_last(self) -> None:
        """Count all micro-batches of the step except the last, because they run together."""
        self.counts = replace(self.counts, micro_steps=self.counts.micro_steps + self._per_step - 1)

    def after_micro_batch(self) -> Counts:
        """Return the counts after the running micro-batch."""
        micro_steps = self.counts.micro_steps + (self._uncounted_passes if self._counts_passes else 1)
        if self.boundary:  # the user may end a step early: round up to whole steps
            micro_steps += -micro_steps % self._per_step
        return replace(self.counts, micro_steps=micro_steps)

    def backward_begins(self) -> None:
        """Count the pass. If the step's last backward pass failed, the step is now running again."""
        self._to_run_again = 0
        self._passes = (self.counts, self._uncounted_passes + 1)

    def begin_step_again(self) -> int:
        """Uncount the step's earlier micro-batches after a failed backward pass. Return their number."""
        earlier = max(0, self._uncounted_passes - 1) if self._counts_passes else self.position
        self._passes = (self.counts, 0)
        self.counts = replace(self.counts, micro_steps=self.counts.micro_steps - self.position)
        self._to_run_again += earlier
        return earlier

    def leave_out(self) -> None:
        """End the step at the same micro-batch as planned, although its gradients were dropped.

        Its earlier micro-batches do not run again.
        """
        uncounted, self._to_run_again = self._to_run_again, 0
        if self._counts_passes:
            uncounted += self._uncounted_passes
        if self.runs_in_one_call:
            uncounted, self.runs_in_one_call = -self.position, False
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
