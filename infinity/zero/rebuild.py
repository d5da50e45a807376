"""The tiers of an engine built again, for other parameters to be trained than so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from infinity.config import Config
from infinity.zero.build import Runtime, build_runtime
from infinity.zero.materialize import materialize_zeros


def rebuild(old: Runtime, model: nn.Module, groups: Mapping[str, int], config: Config, optimizer: str) -> Runtime:
    """Lay out the states of a model whose engine is closed, with zeros for values; all ranks call this together.

    Args:
        old: of the engine that was closed, whose monitor goes on.
        groups: parameter group of every parameter that is trained, by name.
        optimizer: name of its state layout.

    Raises:
        CapacityError: a memory budget is too small for these states.
        StorageError: an nvme path cannot be used or does not have the space.
    """
    config = replace(config, tiering=replace(config.tiering, timeline=None))  # which has ended with the engine
    in_files = {name: place for name, place in old.in_files.items() if name not in groups}
    runtime = build_runtime(model, groups, config, optimizer, old.link, old.ranks, old.parts, in_files=in_files)
    try:
        materialize_zeros(runtime)
    except BaseException:
        runtime.close()
        raise
    return replace(runtime, monitor=old.monitor)  # last: tiers that cannot be filled do not close it
