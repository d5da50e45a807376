"""Bring a model's values into the tiers, one unit at a time.

A model that was built in memory gives its values up as they are moved. Of one on the meta device (see meta.py)
each unit's values are read from where they are stored, or its modules are initialised, so that the whole model never
exists outside of the tiers. Of several ranks, the first one's values count, which it sends to the others; but what all
of them have in the same files each reads for itself, and only its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from infinity.config import Config
from infinity.optim.formats import init_states, read_master
from infinity.optim.pipeline import UpdatePipeline
from infinity.tiers import Residency
from infinity.tiers.state_layout import StateLayout
from infinity.zero.build import Runtime, build_runtime
from infinity.zero.initial_values import InitialValues
from infinity.zero.partition import Partition, UnitLayout
from infinity.zero.ranks import Ranks


def materialize(runtime: Runtime, values: InitialValues, *, rounds: bool) -> None:
    """Write every unit's parameters and fresh optimizer states to their tiers.

    Args:
        rounds: masters begin as what the compute dtype has of the model's values.
    """
    partition, layout = runtime.partition, runtime.layout
    fill = partial(_fill_unit, runtime.pipeline, layout, partition, rounds=rounds)
    alike = values.stored_alike(runtime.ranks)
    for unit in partition.units:
        inexact: set[str] = set()
        if unit.runs:
            _fetch_from_files(runtime, unit)
        elif all(info.name in alike for info in unit.params):
            with runtime.executor.created(runtime.row(unit)) as flat:
                fill(unit, flat, values.read_slice)
        else:
            with runtime.executor.created(runtime.row(unit)) as flat:
                initial = _from_rank_0(values, unit, runtime.ranks)
                fill(unit, flat, partial(_slice_of, initial))
            frozen = [info.name for info in unit.params if not info.trainable]
            inexact = {name for name in frozen if not _holds(layout.param_dtype, initial[name])}
        values.placed(unit, inexact)


def materialize_zeros(runtime: Runtime) -> None:
    """As `materialize`, of values that are loaded afterwards, but for those that stay in files."""

    def zeros(name: str, elements: slice) -> torch.Tensor:
        return torch.zeros(elements.stop - elements.start, dtype=torch.float32, device="cpu")

    for unit in runtime.partition.units:
        if unit.runs:
            _fetch_from_files(runtime, unit)
            continue
        with runtime.executor.created(runtime.row(unit)) as flat:
            _fill_unit(runtime.pipeline, runtime.layout, runtime.partition, unit, flat, zeros, rounds=False)


def rebuild(old: Runtime, model: nn.Module, groups: Mapping[str, int], config: Config, optimizer: str) -> Runtime:
    """Lay out the states of a model whose engine is closed, with zeros for values; all ranks call this together.

    Args:
        old: of the engine that was closed, whose monitor goes on.
        model, groups, config, optimizer: see `build_runtime`.

    Raises:
        CapacityError: a memory budget is too small for these states.
        StorageError: an nvme path cannot be used or does not have the space.
    """
    config = replace(config, tiering=replace(config.tiering, timeline=None))  # which has ended with the engine
    in_files = {name: place for name, place in old.in_files.items() if name not in groups}
    runtime = build_runtime(model, groups, config, optimizer, old.link, old.ranks, old.parts, (), in_files)
    try:
        materialize_zeros(runtime)
    except BaseException:
        runtime.close()
        raise
    return replace(runtime, monitor=old.monitor)  # last: tiers that cannot be filled do not close it


def _fetch_from_files(runtime: Runtime, unit: UnitLayout) -> None:
    """A unit that is in files already, of which there may be room for a copy nearer by."""
    if runtime.row(unit).params.is_stored():
        runtime.executor.refresh(runtime.row(unit))
        return
    with runtime.executor.created(runtime.row(unit)):
        runtime.row(unit).params.copy_in()


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Every value is one of `dtype`."""
    return torch.equal(values.to(dtype).to(values.dtype), values)


def _from_rank_0(values: InitialValues, unit: UnitLayout, ranks: Ranks) -> dict[str, torch.Tensor]:
    if ranks.size == 1:
        return values.take(unit)
    if ranks.rank == 0:
        initial = {name: value.float() for name, value in values.take(unit).items()}
    else:
        initial = {info.name: torch.empty(info.numel, dtype=torch.float32, device="cpu") for info in unit.params}
    for info in unit.params:
        ranks.broadcast(initial[info.name])
    return initial


def _slice_of(initial: Mapping[str, torch.Tensor], name: str, elements: slice) -> torch.Tensor:
    return initial[name][elements]


def _fill_unit(
    pipeline: UpdatePipeline,
    layout: StateLayout,
    partition: Partition,
    unit: UnitLayout,
    flat: torch.Tensor,
    initial: Callable[[str, slice], torch.Tensor],
    *,
    rounds: bool,
) -> None:
    for part in partition.parts(unit):
        if not part.info.trainable:
            flat[part.shard].copy_(initial(part.info.name, part.param))
    for tile, fields in pipeline.tiles(unit.index, writable=True, fresh=True):
        start, stop = tile.start, tile.start + tile.numel
        master = torch.zeros(tile.numel, dtype=torch.float32, device="cpu")
        for part in partition.parts(unit, start, stop):
            master[part.start - start : part.stop - start].copy_(initial(part.info.name, part.param))
        if rounds:
            master.copy_(master.to(layout.param_dtype))
        init_states(layout, master, flat[start:stop], fields)


def resident_first(runtime: Runtime) -> list[UnitLayout]:
    """The units in an order in which reading them back moves the fewest."""
    return sorted(
        runtime.partition.units,
        key=lambda unit: runtime.row(unit).residency is not Residency.RESIDENT,
    )


def stored_values(runtime: Runtime, unit: UnitLayout) -> dict[str, torch.Tensor]:
    """The inverse of `materialize` on one rank: a unit's masters, and frozen parameters in compute dtype; flat."""
    partition, layout = runtime.partition, runtime.layout
    values = {
        info.name: torch.empty(info.numel, dtype=torch.float32 if info.trainable else layout.param_dtype, device="cpu")
        for info in unit.params
    }
    with runtime.executor.resident(runtime.row(unit)) as flat:
        for part in partition.parts(unit):
            if not part.info.trainable:
                values[part.info.name][part.param] = flat[part.shard]
        for tile, fields in runtime.pipeline.tiles(unit.index, writable=False):
            start, stop = tile.start, tile.start + tile.numel
            master = read_master(layout, flat[start:stop], fields)
            for part in partition.parts(unit, start, stop):
                values[part.info.name][part.param] = master[part.start - start : part.stop - start]
    runtime.params.discard(runtime.row(unit).params)  # these values are not read again, so not written either
    return values
