"""Bring a model's values into the tiers, one unit at a time.

A model that was built in memory gives its values up as they are moved. A model that was built on the meta device
(see meta.py) has none: when a unit's turn comes, its values are read from where they are stored, or its modules are
initialised one by one, so that the whole model never exists outside of the tiers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.formats import StateLayout, init_states
from infinity.optim.pipeline import UpdatePipeline
from infinity.zero.executor import Executor
from infinity.zero.meta import InitFunction
from infinity.zero.model_parts import local_part, set_local_part
from infinity.zero.partition import Partition, Unit
from infinity.zero.ranks import ALONE, Ranks

_log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Stored values of parameters, by their name in the model."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """The values, in the parameter's shape and in any floating-point dtype."""


class InitialValues:
    """The values that the model came with, or where they are, or how to make them.

    Constructing it takes the values out of the model: meta parameters are replaced by real ones of the same
    shape (tied ones stay tied), and the others are left without memory of their own once `take` gave them away.
    """

    def __init__(
        self, model: nn.Module, init_function: InitFunction | None, weights: WeightSource | None = None
    ) -> None:
        self._model = model
        self._init_function = init_function
        self._weights = weights
        self._values: dict[str, torch.Tensor] = {}
        for name, param in list(model.named_parameters()):
            if not param.is_floating_point():
                continue
            if param.is_meta:
                _replace_everywhere(model, param)
            else:
                values = self._values[name] = local_part(param).data
                set_local_part(param, _placeholder(values))

    def take(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The initial values of a unit's parameters by name, flat, in the dtype they came in; forgotten here.

        Raises:
            ConfigError: a meta parameter that nothing initialises.
        """
        for slot in unit.slots:
            self._read(slot.name)
        if any(slot.name not in self._values for slot in unit.slots):
            self._initialise(unit)
        return {slot.name: self._values.pop(slot.name).detach().cpu().reshape(-1) for slot in unit.slots}

    def forget(self, unit: Unit) -> None:
        """Leave a unit's values to another rank."""
        for slot in unit.slots:
            self._values.pop(slot.name, None)

    def _read(self, name: str) -> None:
        """Take the values of a parameter from where they are stored, if they are."""
        if self._weights is not None and name not in self._values and name in self._weights:
            self._values[name] = self._weights.read(name)

    def _initialise(self, unit: Unit) -> None:
        """Give the modules that own the unit's parameters memory, have them initialised, and keep the values."""
        if self._init_function is None:
            raise ConfigError(f"parameters of `{unit.name}` are on the meta device and nothing initialises them")
        owners = dict.fromkeys(slot.name.rpartition(".")[0] for slot in unit.slots)
        wanting = dict.fromkeys(slot.name.rpartition(".")[0] for slot in unit.slots if slot.name not in self._values)
        given: dict[str, nn.Parameter] = {}
        for owner in owners:  # all of them: a rule for an outer module writes to parameters that have values, too
            for name, param in self._model.get_submodule(owner).named_parameters(owner, recurse=False):
                self._read(name)
                if param.is_floating_point():
                    param.data = torch.full(param.shape, float("nan"), dtype=torch.float32)
                    given[name] = param
        for module_name in _children_first(wanting, unit.name):
            self._init_function(self._model.get_submodule(module_name))
        for name, param in given.items():
            if name in self._values:
                param.data = _placeholder(param)
                continue
            if self._weights is not None:
                _log.warning("parameter `%s` is not among the stored weights: it is newly initialised", name)
            if param.data.isnan().any():
                raise ConfigError(
                    f"parameter `{name}` is on the meta device and initialising its module left it without values: "
                    "give the module a reset_parameters() method, or build the model in memory"
                )
            self._values[name] = param.data
            param.data = _placeholder(param)


def _children_first(owners: Iterable[str], unit_name: str) -> list[str]:
    """The owners and the modules around them within the unit, inner ones first.

    The outer ones count because an architecture's rule may be written for them (GPT-2 scales the output projections
    of a block by name, in the module that holds them).
    """
    names: dict[str, None] = {}
    for owner in owners:
        name = owner
        names[name] = None
        while name != unit_name and name.startswith(f"{unit_name}."):
            name = name.rpartition(".")[0]
            names[name] = None
    return sorted(names, key=lambda name: -name.count("."))


def _placeholder(param: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=param.dtype, device=param.device).expand(param.shape)


def _replace_everywhere(model: nn.Module, old: nn.Parameter) -> None:
    """Put a real parameter without memory in the place of a meta one, in every module that holds it."""
    nothing = torch.full((), float("nan"), dtype=torch.float32).expand(old.shape)
    new = nn.Parameter(nothing, requires_grad=old.requires_grad)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if param is old:
                setattr(module, name, new)


def materialize(
    partition: Partition,
    values: InitialValues,
    executor: Executor,
    pipeline: UpdatePipeline,
    layout: StateLayout,
    ranks: Ranks = ALONE,
) -> None:
    """Write every unit's parameters and fresh optimizer states to their tiers; rank 0's values count."""
    for unit in partition.units:
        with executor.created(unit.index) as flat:
            _fill_unit(partition, unit, flat, _from_rank_0(values, unit, ranks), pipeline, layout)


def _from_rank_0(values: InitialValues, unit: Unit, ranks: Ranks) -> dict[str, torch.Tensor]:
    if ranks.size == 1:
        return values.take(unit)
    if ranks.rank == 0:
        initial = {name: value.float() for name, value in values.take(unit).items()}
    else:
        values.forget(unit)
        initial = {slot.name: torch.empty(slot.numel) for slot in unit.slots}
    for slot in unit.slots:
        ranks.broadcast(initial[slot.name])
    return initial


def _fill_unit(
    partition: Partition,
    unit: Unit,
    flat: torch.Tensor,
    initial: Mapping[str, torch.Tensor],
    pipeline: UpdatePipeline,
    layout: StateLayout,
) -> None:
    for part in partition.parts(unit):
        if not part.slot.trainable:
            flat[part.shard].copy_(initial[part.slot.name][part.param])
    for tile, fields in pipeline.tiles(unit.index, writable=True, fresh=True):
        start, stop = tile.start, tile.start + tile.numel
        master = torch.zeros(tile.numel, dtype=torch.float32)
        for part in partition.parts(unit, start, stop):
            master[part.start - start : part.stop - start].copy_(initial[part.slot.name][part.param])
        init_states(layout, master, flat[start:stop], fields)
