"""Looking at parameters, and changing them, while their home is a lower tier."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.optim.formats import read_master, write_master
from infinity.zero.build import Runtime
from infinity.zero.partition import ParamSlot, Unit

Gatherable = nn.Module | nn.Parameter | Iterable[nn.Parameter]


class Owner(Protocol):
    """An engine, as far as this file knows it."""

    def begin_gathering(self) -> Runtime:
        """Carry out pending updates; what the engine owns."""


# By identity of the parameter, because tensors compare element by element; the reference tells whether it still lives.
_owners: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Owner], Unit, ParamSlot]] = {}


def claim(owner: Owner, model: nn.Module, units: Iterable[Unit]) -> None:
    """From now on these parameters' values are with `owner`."""
    for unit in units:
        for slot in unit.slots:
            param = model.get_parameter(slot.name)
            _owners[id(param)] = (weakref.ref(param), weakref.ref(owner), unit, slot)


def disclaim(model: nn.Module) -> None:
    """The engine of this model is closed."""
    for param in model.parameters():
        _owners.pop(id(param), None)


class GatheredParameters:
    """Inside this context, the parameters have their values, on the compute device and in its dtype.

    What was changed in them goes to the tiers at the end, if `modifier_rank` is given: to the float32 master as well,
    for the elements that changed, and for these alone. Parameters that no engine has are left as they are. After an
    exception nothing is written.

    Args:
        params: a module (all its parameters), a parameter, or several.
        modifier_rank: the rank whose changes count; None to look only.
        enabled: False to do nothing.

    Raises:
        InfinityError: between a forward pass and its backward, when the values must stay as they are.
    """

    def __init__(self, params: Gatherable, modifier_rank: int | None = None, *, enabled: bool = True) -> None:
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, nn.Parameter):
            params = [params]
        self._params = list(dict.fromkeys(params)) if enabled else []
        self._writes = modifier_rank is not None
        self._gathered: list[tuple[nn.Parameter, Runtime, Unit, ParamSlot]] = []

    def __enter__(self) -> None:
        runtimes: dict[int, Runtime] = {}
        for param in self._params:
            if id(param) not in _owners:
                continue
            reference, owner_reference, unit, slot = _owners[id(param)]
            owner = owner_reference()
            if owner is None or id(reference()) != id(param):
                continue
            if id(owner) not in runtimes:
                runtimes[id(owner)] = owner.begin_gathering()
            self._gathered.append((param, runtimes[id(owner)], unit, slot))
        try:
            for param, runtime, unit, slot in self._gathered:
                with runtime.executor.resident(unit.index) as flat:
                    values = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                    param.data = values.to(param.device, copy=True)
        except BaseException:  # Python does not call __exit__ then
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._writes and kind is None:
                for param, _, _, slot in self._gathered:  # all of them before the first is written
                    _check_shape(param, slot)
                for param, runtime, unit, slot in self._gathered:
                    _write_back(param, runtime, unit, slot)
        finally:
            self._restore()

    def _restore(self) -> None:
        """The parameters are the engine's again."""
        for _, runtime, unit, _ in self._gathered:
            runtime.executor.refresh(unit.index)
        self._gathered.clear()


def _check_shape(param: nn.Parameter, slot: ParamSlot) -> None:
    if tuple(param.shape) != tuple(slot.shape):
        raise InfinityError(f"parameter `{slot.name}` has shape {tuple(param.shape)} now; it must stay {slot.shape}")


def _write_back(param: nn.Parameter, runtime: Runtime, unit: Unit, slot: ParamSlot) -> None:
    """Store what differs from the tiers' values."""
    values = param.data.detach().reshape(-1).cpu()
    layout = runtime.layout
    with runtime.executor.resident(unit.index) as flat:
        current = flat[slot.offset : slot.offset + slot.numel]
        values = values.to(current.dtype)
        changed = values != current
        if not bool(changed.any()):
            return
        if not slot.trainable:
            current.copy_(values)
        else:
            for tile, fields in runtime.pipeline.tiles(unit.index, writable=True):
                low, high = max(tile.start, slot.offset), min(tile.start + tile.numel, slot.offset + slot.numel)
                if low >= high:
                    continue
                states = layout.narrow(fields, low - tile.start, high - tile.start)
                part = slice(low - slot.offset, high - slot.offset)
                master = torch.where(changed[part], values[part].float(), read_master(layout, flat[low:high], states))
                write_master(layout, master, flat[low:high], states)
        runtime.executor.mark_changed(unit.index)
