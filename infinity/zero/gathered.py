"""Looking at parameters, and changing them, while their home is a lower tier."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.optim.formats import read_master, write_master
from infinity.zero.build import Runtime
from infinity.zero.model_parts import is_distributed
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


def check_unowned(model: nn.Module) -> None:
    """A new engine may have this model.

    Raises:
        ConfigError: another one has it, or had it to its end; by the name of a parameter.
    """
    for name, param in model.named_parameters():
        reference, owner, *_ = _owners.get(id(param), (None, None))
        if reference is None or owner is None or reference() is not param:
            continue
        if owner() is not None:
            raise ConfigError(f"parameter `{name}` belongs to another engine: close that one, and build the model anew")
        raise ConfigError(
            f"parameter `{name}` has no values: the engine that had them is gone without close(). Build the model "
            "anew, or load what was saved, before initialize"
        )


class GatheredParameters:
    """Inside this context, the parameters have their values, on the compute device and in its dtype.

    What was changed in them goes to the tiers at the end, if `modifier_rank` is given: to the float32 master as well,
    for the elements that changed, and for these alone. Parameters that no engine has are left as they are. After an
    exception, on any rank, nothing is written. All ranks enter and leave together.

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
        self._modifier_rank = modifier_rank
        self._gathered: list[tuple[nn.Parameter, Runtime, Unit, ParamSlot]] = []

    def __enter__(self) -> None:
        runtimes: dict[int, Runtime] = {}
        for param in self._params:
            if id(param) not in _owners:
                continue
            if is_distributed(param):
                raise InfinityError("parameters that tensor parallelism has divided cannot be gathered")
            reference, owner_reference, unit, slot = _owners[id(param)]
            owner = owner_reference()
            if owner is None or id(reference()) != id(param):
                continue
            if id(owner) not in runtimes:
                runtimes[id(owner)] = owner.begin_gathering()
            self._gathered.append((param, runtimes[id(owner)], unit, slot))
        for runtime in runtimes.values():
            runtime.ranks.together("infinity.zero.GatheredParameters")
        try:
            for param, runtime, unit, slot in self._gathered:
                with runtime.executor.gathered(unit.index) as flat:
                    values = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
                    param.data = values.to(param.device, copy=True)
        except BaseException:  # Python does not call __exit__ then
            self._restore()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._modifier_rank is not None:
                self._write(self._modifier_rank, failed=kind is not None)
        finally:
            self._restore()

    def _write(self, source: int, *, failed: bool) -> None:
        """Store the values of one rank, unless the context has failed on some rank."""
        problem = None if failed else next(filter(None, map(_shape_problem, self._gathered)), None)
        for runtime in {id(runtime): runtime for _, runtime, _, _ in self._gathered}.values():
            failed = runtime.ranks.any(failed or problem is not None)
        if problem is not None:
            raise InfinityError(problem)
        if failed:
            return
        for param, runtime, unit, slot in self._gathered:
            values = param.data.detach().reshape(-1).cpu()
            runtime.ranks.broadcast(values, source)
            _write_back(values, runtime, unit, slot)

    def _restore(self) -> None:
        """The parameters are the engine's again."""
        for _, runtime, unit, _ in self._gathered:
            runtime.executor.refresh(unit.index)
        self._gathered.clear()


def _shape_problem(gathered: tuple[nn.Parameter, Runtime, Unit, ParamSlot]) -> str | None:
    param, _, _, slot = gathered
    if tuple(param.shape) == tuple(slot.shape):
        return None
    return f"parameter `{slot.name}` has shape {tuple(param.shape)} now; it must stay {slot.shape}"


def _write_back(values: torch.Tensor, runtime: Runtime, unit: Unit, slot: ParamSlot) -> None:
    """Store what differs from the tiers' values, as far as it lies in this rank's shard."""
    layout = runtime.layout
    with runtime.executor.resident(unit.index) as flat:
        for part in runtime.partition.parts(unit):
            if part.slot is not slot:
                continue
            current = flat[part.shard]
            here = values[part.param].to(current.dtype)
            changed = here != current
            if not bool(changed.any()):
                continue
            if not slot.trainable:
                current.copy_(here)
                continue
            for tile, fields in runtime.pipeline.tiles(unit.index, writable=True):
                low, high = max(tile.start, part.start), min(tile.start + tile.numel, part.stop)
                if low >= high:
                    continue
                states = layout.narrow(fields, low - tile.start, high - tile.start)
                new = slice(low - part.start, high - part.start)
                master = torch.where(changed[new], here[new].float(), read_master(layout, flat[low:high], states))
                write_master(layout, master, flat[low:high], states)
        runtime.executor.mark_changed(unit.index)
