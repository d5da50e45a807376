"""Bring a model's values into the tiers, one unit at a time.

A model that was built in memory gives its values up as they are moved. A model that was built on the meta device
(see meta.py) has none: its modules are initialised one by one, when their unit's turn comes, so that the whole
model never exists outside of the tiers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.formats import StateLayout, init_states
from infinity.optim.pipeline import UpdatePipeline
from infinity.zero.executor import Executor
from infinity.zero.partition import Partition, Unit

InitFunction = Callable[[nn.Module], None]


class InitialValues:
    """The values that the model came with, or how to make them.

    Constructing it takes the values out of the model: meta parameters are replaced by real ones of the same
    shape (tied ones stay tied), and the others are left without memory of their own once `pop` gave them away.
    """

    def __init__(self, model: nn.Module, init_function: InitFunction | None) -> None:
        self._model = model
        self._init_function = init_function
        self._values: dict[str, torch.Tensor] = {}
        for name, param in list(model.named_parameters()):
            if not param.is_floating_point():
                continue
            if param.is_meta:
                _replace_everywhere(model, param)
            else:
                self._values[name] = param.data
                param.data = _placeholder(param)

    def pop(self, name: str) -> torch.Tensor:
        """The initial value of a parameter, flat, in the dtype it came in; it is forgotten here.

        Raises:
            ConfigError: a meta parameter that nothing initialises.
        """
        if name not in self._values:
            self._initialise(name.rpartition(".")[0])
        return self._values.pop(name).detach().to("cpu").reshape(-1)

    def _initialise(self, module_name: str) -> None:
        """Give the module's own parameters memory, have it initialise them, and keep the values."""
        if self._init_function is None:
            raise ConfigError(f"parameters of `{module_name}` are on the meta device and nothing initialises them")
        module = self._model.get_submodule(module_name)
        own = [(name, param) for name, param in module.named_parameters(recurse=False) if param.is_floating_point()]
        for _, param in own:
            param.data = torch.full(param.shape, float("nan"), dtype=torch.float32)
        self._init_function(module)
        for name, param in own:
            if param.data.isnan().any():
                raise ConfigError(
                    f"parameter `{module_name}.{name}` is on the meta device and initialising its module left it "
                    "without values: give the module a reset_parameters() method, or build the model in memory"
                )
            self._values[f"{module_name}.{name}" if module_name else name] = param.data
            param.data = _placeholder(param)


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
    partition: Partition, values: InitialValues, executor: Executor, pipeline: UpdatePipeline, layout: StateLayout
) -> None:
    """Write every unit's parameters and fresh optimizer states to their tiers."""
    for unit in partition.units:
        with executor.created(unit.index) as flat:
            _fill_unit(unit, flat, values, pipeline, layout)


def _fill_unit(
    unit: Unit, flat: torch.Tensor, values: InitialValues, pipeline: UpdatePipeline, layout: StateLayout
) -> None:
    initial = {slot.name: values.pop(slot.name) for slot in unit.slots}
    for slot in unit.slots:
        if not slot.trainable:
            flat[slot.offset : slot.offset + slot.numel].copy_(initial[slot.name])
    for tile, fields in pipeline.tiles(unit.index, writable=True, fresh=True):
        start, stop = tile.start, tile.start + tile.numel
        master = torch.zeros(tile.numel, dtype=torch.float32)
        for slot in unit.slots:
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if slot.trainable and low < high:
                source = initial[slot.name][low - slot.offset : high - slot.offset]
                master[low - start : high - start].copy_(source)
        init_states(layout, master, flat[start:stop], fields)
