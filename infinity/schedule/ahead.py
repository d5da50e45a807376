"""How far ahead of their use units are brought: the next one if both fit, and more as far as bytes allow."""

from __future__ import annotations

from dataclasses import dataclass

MOST_AHEAD = 16  # uses


@dataclass(frozen=True)
class Ahead:
    """One rule for the plan that fetches and for what gathers, so that they hold the same units.

    Attributes:
        capacity_bytes: memory for units that come and go.
        bytes: of units ahead, where these are more than the next one.
        largest_bytes: of a unit that comes and goes. Units beyond the next one leave room for one more, which is
            fetched meanwhile: else nothing would be read while a unit is computed on.
    """

    capacity_bytes: int
    bytes: int
    largest_bytes: int

    def may_be(self, steps: int, nbytes: int, in_use_bytes: int, ahead_bytes: int) -> bool:
        """A unit that is used so many uses from now may be ahead, beside what is in use and what is ahead already."""
        held_bytes = in_use_bytes + ahead_bytes + nbytes
        if steps == 1:
            return held_bytes <= self.capacity_bytes
        return ahead_bytes + nbytes <= self.bytes and held_bytes + self.largest_bytes <= self.capacity_bytes
