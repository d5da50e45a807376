"""Bring a model's values into the tiers, one unit at a time.

If the model was built in memory, the memory of its values is freed as they are moved. If it is on the meta device (see
meta.py), each unit's values are read from their files, or the unit's modules are initialised, so that the whole model
never exists outside of the tiers. With several ranks, rank 0 sends its values to the others. If all ranks have the same
files, each rank reads only its shards from its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from infinity.config import Config
from infinity.optim.formats import init_states, read_master
from infinity.schedule.unit_state import Residency
from infinity.zero.build import Runtime, build_runtime
from infinity.zero.initial_values import InitialValues
from infinity.zero.partition import UnitLayout
from infinity.zero.ranks import Ranks


def materialize(runtime: Runtime, values: InitialValues, *, rounds: bool) -> None:
    """Write every unit's parameters and fresh optimizer states to their tiers.

    Args:
        rounds: whether masters begin as the model's values rounded to the compute dtype.
    """
    alike = values.stored_alike(runtime.ranks)
    for unit in runtime.partition.units:
        inexact: set[str] = set()
        if unit.runs:
            _fetch_from_files(runtime, unit)
        elif all(info.name in alike for info in unit.params):
            with runtime.executor.created(runtime.row(unit)) as flat:
                _fill_unit(runtime, unit, flat, values.read_slice, rounds=rounds)
        else:
            with runtime.executor.created(runtime.row(unit)) as flat:
                initial = _from_rank_0(values, unit, runtime.ranks)
                _fill_unit(runtime, unit, flat, partial(_slice_of, initial), rounds=rounds)
            frozen = [info.name for info in unit.params if not info.trainable]
            inexact = {name for name in frozen if not _holds(runtime.layout.param_dtype, initial[name])}
        values.placed(unit, inexact)


def materialize_zeros(runtime: Runtime) -> None:
    """Write zeros, because values are loaded later. Parameters that stay in the user's files have their values."""

    def zeros(name: str, elements: slice) -> torch.Tensor:
        return torch.zeros(elements.stop - elements.start, dtype=torch.float32, device="cpu")

    for unit in runtime.partition.units:
        if unit.runs:
            _fetch_from_files(runtime, unit)
            continue
        with runtime.executor.created(runtime.row(unit)) as flat:
            _fill_unit(runtime, unit, flat, zeros, rounds=False)


def rebuild(old: Runtime, model: nn.Module, groups: Mapping[str, int], config: Config, optimizer: str) -> Runtime:
    """Lay out the states of a model whose engine is closed, with zeros for values; all ranks call this together.

    Args:
        old: runtime of the closed engine. The new runtime continues to use its monitor.
        model, groups, config, optimizer: see `build_runtime`.

    Raises:
        CapacityError: a memory budget is too small for these states.
        StorageError: an nvme path cannot be used or does not have the space.
    """
    config = replace(config, tiering=replace(config.tiering, timeline=None))  # it has ended with the old engine
    in_files = {name: place for name, place in old.in_files.items() if name not in groups}
    runtime = build_runtime(model, groups, config, optimizer, old.link, old.ranks, old.parts, (), in_files)
    try:
        materialize_zeros(runtime)
    except BaseException:
        runtime.close()
        raise
    return replace(runtime, monitor=old.monitor)  # last, because `runtime.close` above would close it


def _fetch_from_files(runtime: Runtime, unit: UnitLayout) -> None:
    """Materialize a unit of the user's files: refresh it if the files are its home, else copy it to its home."""
    if runtime.row(unit).params.is_stored():
        runtime.executor.refresh(runtime.row(unit))
        return
    with runtime.executor.created(runtime.row(unit)):
        runtime.row(unit).params.read_image()


def _holds(dtype: torch.dtype, values: torch.Tensor) -> bool:
    """Whether `dtype` holds every value exactly."""
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
    runtime: Runtime,
    unit: UnitLayout,
    flat: torch.Tensor,
    initial: Callable[[str, slice], torch.Tensor],
    *,
    rounds: bool,
) -> None:
    partition, layout = runtime.partition, runtime.layout
    for part in partition.parts(unit):
        if not part.info.trainable:
            flat[part.shard].copy_(initial(part.info.name, part.param))
    for tile, fields in runtime.pipeline.tiles(unit.index, writable=True, fresh=True):
        start, stop = tile.start, tile.start + tile.numel
        master = torch.zeros(tile.numel, dtype=torch.float32, device="cpu")
        for part in partition.parts(unit, start, stop):
            master[part.start - start : part.stop - start].copy_(initial(part.info.name, part.param))
        if rounds:
            master.copy_(master.to(layout.param_dtype))
        init_states(layout, master, flat[start:stop], fields)


def resident_first(runtime: Runtime) -> list[UnitLayout]:
    """Return the units with resident ones first, so that reading them back moves the fewest units."""
    return sorted(runtime.partition.units, key=lambda unit: runtime.row(unit).residency is not Residency.RESIDENT)


def stored_values(runtime: Runtime, unit: UnitLayout) -> dict[str, torch.Tensor]:
    """Return a unit's masters, and frozen parameters in compute dtype, flat. Reverses `materialize` on one rank."""
    layout = runtime.layout
    values = {
        info.name: torch.empty(info.numel, dtype=torch.float32 if info.trainable else layout.param_dtype, device="cpu")
        for info in unit.params
    }
    with runtime.executor.resident(runtime.row(unit)) as flat:
        for part in runtime.partition.parts(unit):
            if not part.info.trainable:
                values[part.info.name][part.param] = flat[part.shard]
        for part, states in runtime.trained_parts(unit, writable=False):
            values[part.info.name][part.param] = read_master(layout, flat[part.shard], states)
    runtime.params.discard(runtime.row(unit).params)  # they are not read again, so they need not be written
    return values
