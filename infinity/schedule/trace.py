"""The order in which one forward and backward pass touches the units.

A trace is advice. It is recorded anew in every cycle, compared with the one that the plan was made from,
and replaces it when they differ; a cycle that leaves the trace is served on demand and stays correct.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Trace:
    """Records unit indices in the order of their use."""

    uses: list[int] = field(default_factory=list)

    def use(self, unit: int) -> None:
        """The unit is used now."""
        self.uses.append(unit)
