"""How finely a model has to be divided for its memory: whole blocks if they fit, else smaller and smaller parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from infinity.config import Config, format_size
from infinity.zero.sizing import Sizing

_FINEST = 1024  # parts of the largest unit: a block of as many experts comes apart, and no search is long

_log = logging.getLogger(__name__)


class Fit(NamedTuple):
    """A configuration with the size of units that was chosen, and its layout.

    Attributes:
        cut_bytes: the least host budget of all ways to cut, where none fits and that is less than blocks need whole.
    """

    config: Config
    sizing: Sizing
    cut_bytes: int | None = None


def cut_to_fit(config: Config, size_up: Callable[[Config], Sizing], fits: Callable[[Sizing], bool]) -> Fit:
    """Resolve `tiering.max_unit_size`, and lay the model out with it.

    Each part of a block costs a gather and a reduction, so "auto" cuts only where whole blocks do not fit, and no finer
    than to the first half, quarter, ... of the largest unit that does.

    Args:
        size_up: the layout under a configuration.
        fits: memory has room for what a layout needs at least, on all ranks that compute together: they have to cut
            alike.
    """
    whole = size_up(config)
    if config.tiering.max_unit_size_bytes is not None or fits(whole):
        return Fit(config, whole)
    units, least_bytes = len(whole.specs), whole.host_needs().least_bytes
    cut_bytes = least_bytes
    limit = whole.largest.nbytes
    while limit > max(1, whole.largest.nbytes // _FINEST):
        limit //= 2
        cut = replace(config, tiering=replace(config.tiering, max_unit_size_bytes=limit))
        sizing = size_up(cut)
        if len(sizing.specs) == units:
            continue  # nothing more came apart
        units = len(sizing.specs)
        if fits(sizing):
            _log.info("blocks are cut to units of at most %s: whole ones do not fit", format_size(limit))
            return Fit(cut, sizing)
        cut_bytes = min(cut_bytes, sizing.host_needs().least_bytes)
    return Fit(config, whole, cut_bytes if cut_bytes < least_bytes else None)  # which is refused
