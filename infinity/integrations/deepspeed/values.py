"""Read and set a parameter's master, gradient and optimizer states, as a whole or this rank's part.

All ranks call these functions together; functions that set a value get the same arguments on all ranks. For a parameter
without an engine, they return None or do nothing. Gradients are those of the step so far, without the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError, InfinityError
from infinity.kernels import load_moment, store_moment
from infinity.optim.formats import read_master, write_master
from infinity.tiers import Sharding
from infinity.zero.build import Runtime
from infinity.zero.param_access import Place, owner_of
from infinity.zero.partition import ParamPart


@dataclass(frozen=True)
class _Found:
    """A parameter of an engine whose values can be accessed now."""

    engine: Engine
    runtime: Runtime
    place: Place

    @property
    def parts(self) -> list[ParamPart]:
        """This rank's parts of the parameter."""
        return list(self.runtime.partition.parts(self.place.unit, of=self.place.info))

    def with_states(self, *, writable: bool) -> Iterator[tuple[ParamPart, dict[str, torch.Tensor]]]:
        """Yield this rank's parts of the parameter, which is trained, and their optimizer states."""
        return self.runtime.trained_parts(self.place.unit, writable=writable, of=self.place.info)

    def zeros(self) -> torch.Tensor:
        """Return a flat tensor of zeros for the values of all ranks."""
        return torch.zeros(self.place.info.numel, dtype=torch.float32, device="cpu")

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        """Exchange the ranks' parts of a flat tensor, and return it in the parameter's shape."""
        runtime, unit = self.runtime, self.place.unit
        count = runtime.partition.sharding.count
        for rank in range(count) if count > 1 else ():
            for part in unit.parts(Sharding(rank, count), of=self.place.info):
                runtime.groups.sharing.broadcast(mine[part.param], rank)
        return mine.view(self.place.info.shape).to(runtime.row(unit).params.tensor.device)

    def local(self, mine: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a flat tensor; the whole tensor if states are not divided."""
        device = self.runtime.row(self.place.unit).params.tensor.device
        return torch.cat([mine[part.param] for part in self.parts] or [mine[:0]]).to(device)

    def spread(self, value: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor with this rank's part set: the inverse of `local`. The first replica's values count."""
        numels = [part.stop - part.start for part in self.parts]
        if sum(numels) != value.numel():
            name = self.place.info.name
            raise ConfigError(f"`{name}`: this rank's part has {sum(numels)} elements, not {value.numel()}")
        mine = self.zeros()
        for part, own in zip(self.parts, value.reshape(-1).split(numels), strict=True):
            mine[part.param] = own.float().cpu()
            if self.runtime.sizing.rules.params.gathers:
                self.runtime.groups.replicas.broadcast(mine[part.param])
        return mine


Whole = Callable[[_Found, torch.Tensor], torch.Tensor]


def _owner(param: nn.Parameter) -> tuple[Engine, Place] | None:
    found = owner_of(param)
    if found is None:
        return None
    assert isinstance(found[0], Engine)
    return found[0], found[1]


def _find(param: nn.Parameter, what: str, *, stores: bool) -> _Found | None:
    owner = _owner(param)
    if owner is None:
        return None
    engine, place = owner
    runtime = engine.begin_gathering(what, stores=stores)
    if stores and engine.lends(place):
        raise InfinityError(
            f"{what}: `{place.info.name}` is gathered; leave GatheredParameters first, or change it there"
        )
    return _Found(engine, runtime, place)


def _flat(value: torch.Tensor, found: _Found, what: str) -> torch.Tensor:
    info = found.place.info
    if value.numel() != info.numel:
        raise ConfigError(f"{what}: `{info.name}` has {info.numel} elements, and the value {value.numel()}")
    return value.detach().reshape(-1).float().cpu()


# Masters #


def _master(param: nn.Parameter, what: str, give: Whole) -> torch.Tensor | None:
    found = _find(param, what, stores=False)
    return None if found is None or not found.place.info.trainable else give(found, _float32(found))


def _float32(found: _Found) -> torch.Tensor:
    """Return a flat tensor with this rank's part of the master, or of a frozen parameter's values."""
    runtime, place = found.runtime, found.place
    mine = found.zeros()
    with runtime.executor.resident(runtime.row(place.unit)) as flat:
        if place.info.trainable:
            for part, states in found.with_states(writable=False):
                mine[part.param] = read_master(runtime.layout, flat[part.shard], states)
        else:
            for part in found.parts:
                mine[part.param] = flat[part.shard].float()
    return mine


def full_fp32_values(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole values of a parameter in float32: its master or, if it is frozen, its widened values.

    Return None if the parameter has no engine. All ranks call this together.
    """
    found = _find(param, "full_fp32_values", stores=False)
    return None if found is None else found.whole(_float32(found))


def local_values(param: nn.Parameter) -> torch.Tensor | None:
    """Return a flat copy of this rank's part of the parameter itself, in the compute dtype."""
    found = _find(param, "param.ds_tensor", stores=False)
    if found is None:
        return None
    with found.runtime.executor.resident(found.runtime.row(found.place.unit)) as flat:
        return torch.cat([flat[part.shard] for part in found.parts] or [flat[:0]]).clone()


def _set_master(param: nn.Parameter, what: str, take: Callable[[_Found], torch.Tensor]) -> None:
    found = _find(param, what, stores=True)
    if found is None:
        return
    runtime, place = found.runtime, found.place
    values = take(found)
    with runtime.executor.changing(runtime.row(place.unit)) as flat:
        if place.info.trainable:
            for part, states in found.with_states(writable=True):
                write_master(runtime.layout, values[part.param], flat[part.shard], states)
        else:
            for part in found.parts:
                flat[part.shard].copy_(values[part.param])
    runtime.show_newest()


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the whole float32 master; None for a frozen parameter."""
    return _master(param, "safe_get_full_fp32_param", _Found.whole)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the float32 master, flat; None for a frozen parameter."""
    return _master(param, "safe_get_local_fp32_param", _Found.local)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the master, and the parameter to its rounded value."""
    what = "safe_set_full_fp32_param"
    _set_master(param, what, lambda found: _flat(value, found, what))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master and the parameter, flat."""
    _set_master(param, "safe_set_local_fp32_param", lambda found: found.spread(value))


# Optimizer states #


def moment_names(params: Iterable[nn.Parameter]) -> list[str]:
    """Return the names of the moments; empty if none of the parameters is trained."""
    found = [found for param in params if (found := _find(param, "optimizer.state", stores=False)) is not None]
    trained = [one for one in found if one.place.info.trainable]
    return _names(trained[0]) if trained else []


def _names(found: _Found) -> list[str]:
    layout = found.runtime.layout
    return [name for name in (layout.first, layout.second) if name is not None]


def _moment_name(found: _Found, key: str) -> str:
    names = _names(found)
    if key not in names:
        raise ConfigError(f"the optimizer has no state {key!r} for each element; it has {', '.join(names)}")
    return key


def _moment(param: nn.Parameter, key: str, what: str, give: Whole) -> torch.Tensor | None:
    found = _find(param, what, stores=False)
    if found is None or not found.place.info.trainable:
        return None
    layout, name = found.runtime.layout, _moment_name(found, key)
    mine = found.zeros()
    for part, states in found.with_states(writable=False):
        moment = layout.moment(states, name)
        assert moment is not None
        mine[part.param] = load_moment(moment, signed=name == layout.first)
    return give(found, mine)


def _set_moment(param: nn.Parameter, key: str, what: str, take: Callable[[_Found], torch.Tensor]) -> None:
    found = _find(param, what, stores=True)
    if found is None:
        return
    if not found.place.info.trainable:
        raise InfinityError(f"{what}: `{found.place.info.name}` is not trained, and has no optimizer states")
    layout, name = found.runtime.layout, _moment_name(found, key)
    values = take(found)
    for part, states in found.with_states(writable=True):
        moment = layout.moment(states, name)
        assert moment is not None
        store_moment(moment, values[part.param].contiguous(), signed=name == layout.first, dither=None)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole moment, such as `exp_avg`, in float32; None for a frozen parameter."""
    return _moment(param, optim_state_key, "safe_get_full_optimizer_state", _Found.whole)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's part of a moment, flat, in float32; None for a frozen parameter."""
    return _moment(param, optim_state_key, "safe_get_local_optimizer_state", _Found.local)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a moment, rounded to the state format."""
    what = "safe_set_full_optimizer_state"
    _set_moment(param, optim_state_key, what, lambda found: _flat(value, found, what))


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's part of a moment, flat."""
    _set_moment(param, optim_state_key, "safe_set_local_optimizer_state", lambda found: found.spread(value))


# Gradients #


def _gradient(param: nn.Parameter, what: str, give: Whole) -> torch.Tensor | None:
    owner = _owner(param)
    if owner is None:
        return None
    engine, place = owner
    waits = engine.gradients_wait(what)
    flat = engine.waiting_gradient(place) if waits else engine.local_gradients(place, what)
    if flat is None:
        return None
    found, scale = _Found(engine, engine.begin_gathering(what, stores=False), place), engine.optimizer.loss_scaler.value
    if waits:  # it is the whole gradient
        return found.local(flat / scale) if give is _Found.local else (flat / scale).view(place.info.shape)
    mine = found.zeros()
    for part in found.parts:
        mine[part.param] = flat[part.shard].float() / scale
    return give(found, mine)


def _set_gradient(param: nn.Parameter, what: str, take: Callable[[_Found], torch.Tensor]) -> None:
    owner = _owner(param)
    if owner is None:
        return
    engine, place = owner
    gradients = engine.local_gradients(place, what)
    if gradients is None:
        raise InfinityError(f"{what}: the parameter has no gradient; call it between backward and step()")
    found = _Found(engine, engine.begin_gathering(what, stores=False), place)
    values = take(found)
    for part in found.parts:
        gradients[part.shard] = (values[part.param] * engine.optimizer.loss_scaler.value).to(gradients.dtype)
    engine.gradients_changed(place)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient in float32; None if there is none.

    At stages 0 and 1 gradients are reduced in the backward pass of the last micro-batch. Before it, this returns a
    reduced copy of the gradients so far; inside `no_sync`, the gradient of this rank alone.

    Raises:
        InfinityError: the gradient has been used for an update.
    """
    return _gradient(param, "safe_get_full_grad", _Found.whole)


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the gradient, flat, in float32; None if there is none."""
    return _gradient(param, "safe_get_local_grad", _Found.local)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the gradient that `step()` will use, also for the norm."""
    _set_gradient(param, "safe_set_full_grad", lambda found: _flat(value, found, "safe_set_full_grad"))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the gradient, flat."""
    _set_gradient(param, "safe_set_local_grad", lambda found: found.spread(value))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by `update_func(gradient, parameter)`."""
    what = "safe_update_full_grad_vectorized"
    for param in param_list:
        grad = _gradient(param, what, _Found.whole)
        if grad is None:
            continue
        value = update_func(grad, param)
        _set_gradient(param, what, lambda found, value=value: _flat(value, found, what))  # type: ignore[misc]
