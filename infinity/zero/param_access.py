"""Access of user code to parameters: which engine owns a parameter, and how its values are read and changed.

[Note: lent parameters]
Parameters that a user reads at once may exceed the budget for parameters: fetching the unit of one would evict the unit
of another. So such a parameter is *lent*: until it is taken back, it points at a copy outside of every budget, which
stays even if its unit is evicted. Before anything is read, the free memory is checked; the error names the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.config import format_size
from infinity.errors import CapacityError, ConfigError, InfinityError
from infinity.memory import free_bytes
from infinity.optim.formats import read_master, write_master
from infinity.zero.adapters import is_unmerged
from infinity.zero.build import Runtime
from infinity.zero.model_parts import is_distributed
from infinity.zero.outside_units import codes
from infinity.zero.partition import ParamInfo, ParamPart, UnitLayout
from infinity.zero.ranks import ranks_on_this_machine
from infinity.zero.views import UnitViews

Gatherable = nn.Module | nn.Parameter | Iterable[nn.Parameter]
_CPU = torch.device("cpu")


class Owner(Protocol):
    """An engine, as code outside of the training loop sees it."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    @property
    def awaits_backward(self) -> bool:
        """Whether a forward pass is running, or has not had its backward pass yet."""

    def finish_updates(self, what: str) -> None:
        """Finish pending updates, because `what` reads the parameters."""

    def begin_gathering(self, what: str, *, stores: bool) -> Runtime:
        """Finish pending updates, because `what` reads parameters. Return the engine's runtime.

        Args:
            stores: whether it also changes them.
        """

    def lends(self, place: Place) -> bool:
        """Whether this parameter is lent."""

    def shows(self, place: Place) -> bool:
        """Whether this parameter is lent, or used by a running pass of the model."""

    def model_was_zeroed(self) -> None:
        """Called by the model's own `zero_grad`."""

    def compiling(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context in which the own `compile` of the model, or of a module of it, does its work."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a parameter's values are: in which unit, and at which index of it."""

    param: nn.Parameter
    unit: UnitLayout
    index: int

    @property
    def info(self) -> ParamInfo:
        return self.unit.params[self.index]


# By identity of the parameter, because tensors compare element by element.
_owners: MutableMapping[nn.Parameter, tuple[weakref.ref[Owner], UnitLayout, int]] = WeakIdKeyDictionary()


def claim(owner: Owner, model: nn.Module, units: Iterable[UnitLayout]) -> None:
    """Register `owner` as the engine of these parameters."""
    for unit in units:
        for index, info in enumerate(unit.params):
            _owners[model.get_parameter(info.name)] = weakref.ref(owner), unit, index


def disclaim(model: nn.Module) -> None:
    """Forget the closed engine of this model."""
    for param in model.parameters():
        _owners.pop(param, None)


def check_unowned(model: nn.Module) -> None:
    """Check that no other engine owns this model.

    Raises:
        ConfigError: another engine owns it, or owned it and was collected without `close()`; names a parameter.
    """
    for name, param in model.named_parameters():
        if param not in _owners:
            continue
        if owner_of(param) is not None:
            raise ConfigError(
                f"parameter `{name}` belongs to another engine: call its destroy(), which gives the model its values, "
                "or close() it and build the model again"
            )
        raise ConfigError(
            f"parameter `{name}` has no values: the engine that had them was dropped without close(). Build the model "
            "again, or load saved values, before initialize"
        )


def owner_of(param: nn.Parameter) -> tuple[Owner, Place] | None:
    """Return the engine that owns the parameter, and the parameter's place; None if no engine owns it."""
    if param not in _owners:
        return None
    reference, unit, index = _owners[param]
    owner = reference()
    return None if owner is None else (owner, Place(param, unit, index))


@torch.inference_mode(False)  # parameters may be set to these tensors, and must stay trainable
def unit_values(
    runtime: Runtime, unit: UnitLayout, indices: Sequence[int], device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return copies of parameters of a unit, in their shapes and compute dtype. All ranks call this together.

    Args:
        device: for the copies; by default the compute device.
    """
    copies = []
    with runtime.executor.gathered(runtime.row(unit)) as flat:
        for info in (unit.params[index] for index in indices):
            values = flat[info.offset : info.offset + info.numel].view(info.shape)
            copies.append(values.to(device or runtime.row(unit).params.tensor.device, copy=True))
    return copies


def newest_values(
    runtime: Runtime, model: nn.Module, synchronize: Callable[[], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of all parameters in host memory, by name, in the model's order. A unit's are copied together.

    Parameters that belong to no unit (integers and other codes) are included. No unit stays pinned between two values,
    so the caller may stop early.
    """
    runtime.together("engine.named_parameters()")
    places = {info.name: (unit, index) for unit in runtime.partition.units for index, info in enumerate(unit.params)}
    position = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    coded = codes(model)  # they belong to no unit
    names = sorted((*places, *coded), key=lambda name: position.get(name, len(position)))
    for number, neighbours in groupby(names, key=lambda name: places[name][0].index if name in places else None):
        if number is None:
            for name in neighbours:
                yield name, coded[name].to(_CPU, copy=True)
            continue
        unit, indices = runtime.partition.units[number], [places[name][1] for name in neighbours]
        synchronize()
        values = unit_values(runtime, unit, indices, _CPU)
        for at, index in enumerate(indices):
            lent = runtime.row(unit).views.lent_values(index)
            if lent is not None:
                values[at] = lent.to(_CPU, copy=True)
        values.reverse()
        for index in indices:
            yield unit.params[index].name, values.pop()


class LentParams:
    """Parameters of one engine that are lent until `end`, see [Note: lent parameters].

    A parameter that is already lent is not lent again, and stays lent after `end`. All ranks lend together.

    Args:
        device: where the copies are; by default on the compute device.
        what: the caller, and advice if memory is short, for the message.
        watched: whether `changed` also detects writes to `param.data`.

    Raises:
        CapacityError: a rank has no memory for the copies.
    """

    def __init__(
        self,
        runtime: Runtime,
        places: Iterable[Place],
        what: tuple[str, str],
        device: torch.device | None = None,
        *,
        watched: bool = False,
    ) -> None:
        self.runtime = runtime
        self.places = tuple(places)
        self._lent: list[Place] = []
        own = [place for place in self.places if not is_lent(runtime, place)]
        check_room(runtime, own, what, device)
        try:
            for group in by_unit(own).values():
                unit = group[0].unit
                values = unit_values(runtime, unit, [place.index for place in group], device)
                for place, copy in zip(group, values, strict=True):
                    self._lent.append(place)  # before `lend`: after an interrupt, `end` must find it
                    views_of(runtime, place).lend(place.index, copy, watched=watched)
        except BaseException:
            self.end()
            raise

    def store(self, source: int = 0) -> None:
        """Store the values of rank `source` in the tiers, for the elements that differ."""
        for place in self.places:
            if self.runtime.executor.views.detached:
                raise InfinityError(
                    f"the engine was closed while `{place.info.name}` was gathered: its changes are lost"
                )
            values = place.param.data.detach().reshape(-1).cpu()
            self.runtime.ranks.broadcast(values, source)
            _write_back(values, self.runtime, place)
            views_of(self.runtime, place).mark_stored(place.index)

    def changed(self, model: nn.Module) -> Iterator[str]:
        """Yield the names of this loan's parameters that were changed and not stored.

        An adapter that was merged into a weight of `model` and unmerged leaves a rounding error. It is no change.
        """
        for place in self._lent:
            views = views_of(self.runtime, place)
            if views.changed(place.index) or (
                views.rewritten(place.index)
                and not (is_unmerged(model, place.info.name) and self._differs_by_rounding(place))
            ):
                yield place.info.name

    def _differs_by_rounding(self, place: Place) -> bool:
        """Whether the values in this rank's shard differ from the stored values only by rounding."""
        values = views_of(self.runtime, place).values(place.index)
        if values.shape != place.info.shape:
            return False
        values = values.reshape(-1).cpu()
        with self.runtime.executor.resident(self.runtime.row(place.unit)) as flat:
            for part in self.runtime.partition.parts(place.unit, of=place.info):
                known = flat[part.shard].float()
                error = values[part.param].float() - known
                # 8 eps: merging and unmerging an adapter of twenty times the weight leaves less
                if error.norm() > 8 * torch.finfo(flat.dtype).eps * known.norm():
                    return False
        return True

    def end(self) -> None:
        """Return the parameters to the engine."""
        for place in self._lent:
            if is_lent(self.runtime, place):
                self.runtime.executor.take_back(self.runtime.row(place.unit), place.index)
        self._lent.clear()


def views_of(runtime: Runtime, place: Place) -> UnitViews:
    return runtime.row(place.unit).views


def is_lent(runtime: Runtime, place: Place) -> bool:
    """Whether the parameter is lent, see [Note: lent parameters]."""
    return views_of(runtime, place).lent_values(place.index) is not None


def by_unit(places: Iterable[Place]) -> dict[int, list[Place]]:
    grouped: dict[int, list[Place]] = {}
    for place in places:
        grouped.setdefault(place.unit.index, []).append(place)
    return grouped


def make_whole(runtime: Runtime, places: Iterable[Place]) -> None:
    """Gather parameters that stay in memory, because other ranks may have updated parts of them."""
    for group in by_unit(places).values():
        with runtime.executor.gathered(runtime.row(group[0].unit)):
            pass


def check_room(
    runtime: Runtime, places: Sequence[Place], what: tuple[str, str], device: torch.device | None = None
) -> None:
    """Refuse copies of parameters for which a rank has no memory. If ranks share units, all ranks refuse together."""
    if not places:
        return
    here = runtime.row(places[0].unit).params.tensor
    nbytes = sum(place.info.numel for place in places) * here.dtype.itemsize
    target = device or here.device
    free = free_bytes(target) // (ranks_on_this_machine(runtime.ranks) if target == _CPU else 1)
    short = nbytes > free
    if runtime.partition.sharding.count > 1:
        short = runtime.ranks.any(short)
    if short:
        asked, advice = what
        names = f"`{places[0].info.name}`" + (f" and {len(places) - 1} others" if len(places) > 1 else "")
        raise CapacityError(
            f"{asked} needs {format_size(nbytes)} of {target.type} memory for copies of {names}, outside of the "
            f"budgets, and {format_size(free)} are free: {advice}"
        )


class GatheredParameters:
    """A context in which parameters have their newest, unsharded values, on the compute device, in the compute dtype.

    All ranks enter and leave it together. With a `modifier_rank`, the changes of that rank are stored in the tiers at
    the end, and the float32 masters of the changed elements follow. After an exception on any rank, nothing is stored.
    Parameters that no engine owns are left alone. Contexts may be nested: the outer one keeps its parameters gathered.

    At stages 0 to 2 without a `modifier_rank`, parameters are not copied: a write to one has the same effect as outside
    of the context.

    You can compute a loss in the context: its graph keeps the values that backward needs.

    Args:
        params: a module (all its parameters), a parameter, or several.
        modifier_rank: the rank whose changes count; None to read only.
        enabled: False to do nothing.

    Raises:
        ConfigError: `params` has another type, or there is no such rank.
        InfinityError: on entry, with a `modifier_rank` between a forward pass and its backward pass, where values must
            not change; at the end, if a parameter was changed at stage 3 without a `modifier_rank`, in place or through
            its `.data`. An adapter that was merged and unmerged again is no change.
        CapacityError: the parameters do not fit in memory together, in addition to the budgets.
    """

    def __init__(self, params: Gatherable, modifier_rank: int | None = None, *, enabled: bool = True) -> None:
        if modifier_rank is not None and type(modifier_rank) is not int:
            raise ConfigError(f"GatheredParameters: modifier_rank is {modifier_rank!r}; give a rank's number, or None")
        self._params = _several(params) if enabled else []
        self._modifier_rank = modifier_rank
        self._loans: list[tuple[nn.Module, LentParams]] = []  # with the model of each
        self._saving = ExitStack()

    def __enter__(self) -> None:
        by_owner: dict[Owner, list[Place]] = {}
        for param in self._params:
            found = owner_of(param)
            if found is None:
                continue
            if is_distributed(param):
                raise InfinityError("parameters that tensor parallelism has divided cannot be gathered")
            owner, place = found
            by_owner.setdefault(owner, []).append(place)
        try:
            with torch._C.DisableTorchFunction():  # not a use of the parameters, see reads.py
                self._begin(by_owner)
        except BaseException:  # Python then does not call __exit__
            self._end()
            raise

    def _begin(self, by_owner: Mapping[Owner, list[Place]]) -> None:
        what = "GatheredParameters", "gather fewer of them at a time"
        for owner, places in by_owner.items():
            reads_only = self._modifier_rank is None
            runtime = owner.begin_gathering(what[0], stores=not reads_only)
            size = runtime.ranks.size
            if self._modifier_rank is not None and not 0 <= self._modifier_rank < size:
                raise ConfigError(
                    f"GatheredParameters: modifier_rank is {self._modifier_rank}, and there are {size} ranks: give "
                    f"one from 0 to {size - 1}"
                )
            if reads_only and runtime.executor.views.writable:
                # The user's files must not change: a write to a lent copy of them is detected.
                make_whole(runtime, [place for place in places if not place.unit.runs])
                places = [place for place in places if place.unit.runs]
            self._loans.append((owner.module, LentParams(runtime, places, what, watched=reads_only)))
        if any(owner.awaits_backward for owner in by_owner):
            # Autograd would save the parameter itself, whose values change at the end of the context.
            self._saving.enter_context(
                torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), lambda values: values)
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with torch._C.DisableTorchFunction():
            self._finish(failed=kind is not None)

    def _finish(self, *, failed: bool) -> None:
        lost = None
        try:
            if self._modifier_rank is not None:
                self._write(self._modifier_rank, failed=failed)
            elif not failed:
                lost = next((name for model, loan in self._loans for name in loan.changed(model)), None)
        finally:
            self._end()
        if lost is not None:
            raise InfinityError(
                f"in-place modification of `{lost}` in GatheredParameters without modifier_rank: its change is lost. "
                "Give modifier_rank=0, whose values every rank gets"
            )

    def _write(self, source: int, *, failed: bool) -> None:
        """Store the values of one rank, unless the context has failed on some rank."""
        loans = [loan for _, loan in self._loans]
        places = [place for loan in loans for place in loan.places]
        misshapen = [place for place in places if not failed and place.param.shape != place.info.shape]
        anywhere = [loan.runtime.ranks.any(failed or bool(misshapen)) for loan in loans]
        if misshapen:
            info, shape = misshapen[0].info, tuple(misshapen[0].param.shape)
            raise InfinityError(f"parameter `{info.name}` has shape {shape} now; it must stay {info.shape}")
        if not any(anywhere):
            for loan in loans:
                loan.store(source)

    def _end(self) -> None:
        self._saving.close()
        for _, loan in self._loans:
            loan.end()
        self._loans.clear()


def _several(params: Any) -> list[nn.Parameter]:
    """Return each of these parameters once. A None in the list is kept; no engine owns it."""
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    elif not isinstance(params, Iterable) or isinstance(params, str):
        raise ConfigError(f"GatheredParameters: params is {params!r}; give a module, a parameter or several parameters")
    return list(dict.fromkeys(params))


def _write_back(values: torch.Tensor, runtime: Runtime, place: Place) -> None:
    """Store the values in this rank's shard that differ from the stored ones."""
    row, layout = runtime.row(place.unit), runtime.layout
    parts = list(runtime.partition.parts(place.unit, of=place.info))
    if place.unit.runs:
        with runtime.executor.resident(row) as flat:
            if not _differs(values, flat, parts):
                return  # otherwise `changing` raises with the reason
    with runtime.executor.changing(row) as flat:
        if not _differs(values, flat, parts):
            return
        if not place.info.trainable:
            for part in parts:
                flat[part.shard].copy_(values[part.param])
            return
        for part, states in runtime.trained_parts(place.unit, writable=True, of=place.info):
            current, here = flat[part.shard], values[part.param].to(flat.dtype)
            master = torch.where(here != current, here.float(), read_master(layout, current, states))
            write_master(layout, master, current, states)


def _differs(values: torch.Tensor, flat: torch.Tensor, parts: Iterable[ParamPart]) -> bool:
    """Whether a value in this rank's shard differs from the stored one."""
    return any(not torch.equal(values[part.param].to(flat.dtype), flat[part.shard]) for part in parts)
