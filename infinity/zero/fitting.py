"""How finely a model has to be divided for its memory: whole blocks if they fit, else smaller and smaller parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from infinity.config import Config, format_size
from infinity.zero.sizing import Sizing

_FINEST = 1024  # parts of the largest unit: a block of as many experts comes apart, and no search is long

_log = logging.getLogger(__name__)


def cut_to_fit(
    config: Config, size_up: Callable[[Config], Sizing], lacking: Callable[[Sizing], int]
) -> tuple[Config, Sizing]:
    """Resolve `tiering.max_unit_size`, and lay the model out with it.

    Each part of a block costs a gather and a reduction, so "auto" cuts only where whole blocks do not fit, and no finer
    than to the first half, quarter, ... of the largest unit that does.

    Args:
        size_up: the layout under a configuration.
        lacking: bytes by which memory is too small for what a layout needs at least; the same on all ranks, as they
            have to cut alike.

    Returns:
        The configuration with the size that was chosen, and its layout: where none fits, the one that lacks least.
    """
    whole = size_up(config)
    best, best_lacks = (config, whole), lacking(whole)
    if config.tiering.max_unit_size_bytes is not None or not best_lacks:
        return best
    largest, units = whole.largest, len(whole.specs)
    limit = largest.nbytes
    while limit > max(1, largest.nbytes // _FINEST):
        limit //= 2
        cut = replace(config, tiering=replace(config.tiering, max_unit_size_bytes=limit))
        sizing = size_up(cut)
        if len(sizing.specs) == units:
            continue  # nothing more came apart
        units, lacks = len(sizing.specs), lacking(sizing)
        if lacks < best_lacks:
            best, best_lacks = (cut, sizing), lacks
        if not lacks:
            _log.info("blocks are cut to units of at most %s: whole ones do not fit", format_size(limit))
            break
    return best
