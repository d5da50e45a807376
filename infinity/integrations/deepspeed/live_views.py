"""Flat tensors of a parameter or an optimizer that scripts read, and whose values are in the tiers.

[Note: live views]
DeepSpeed keeps this rank's part of masters and gradients in flat tensors, which scripts access by name. Here such a
tensor has a size but no memory: every operation on it reads the newest values from the tiers, and returns an ordinary
tensor. An operation that would change it is refused, because the change would not reach the tiers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from infinity.config import format_size
from infinity.errors import CapacityError, InfinityError
from infinity.integrations.deepspeed.values import (
    local_values,
    moment_names,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
)
from infinity.memory import free_bytes
from infinity.zero.param_access import GatheredParameters, owner_of
from infinity.zero.partition import Partition
from infinity.zero.ranks import join_ranks, world_size

Read = Callable[[], torch.Tensor]
Part = Callable[[nn.Parameter, int], torch.Tensor | None]  # (parameter, number of elements): returns this rank's part
_CPU = torch.device("cpu")


class LiveView(torch.Tensor):
    """A tensor whose values are read when they are used, see [Note: live views].

    Args:
        name: name of the tensor, for messages.
        shape, dtype, device: properties of the values. An int is the length of a flat tensor.
        read: returns the values. All ranks call it together if parameters are divided.

    Attributes:
        parameters: the parameters whose masters the tensor concatenates, to find their moments.
    """

    parameters: tuple[nn.Parameter, ...] = ()
    _what: str
    _read: Read

    @staticmethod
    def __new__(
        cls, name: str, shape: int | torch.Size, dtype: torch.dtype, device: torch.device, read: Read
    ) -> LiveView:
        size = (shape,) if isinstance(shape, int) else shape
        made: LiveView = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made._what, made._read = name, read
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(given, LiveView) and argument.alias_info is not None and argument.alias_info.is_write:
                raise InfinityError(
                    f"{func.__name__} of {given._what}: its values are in the tiers, and this is for reading. Change "
                    "them with deepspeed.utils.safe_set_local_fp32_param, safe_set_local_grad and "
                    "safe_set_local_optimizer_state, or in zero.GatheredParameters"
                )
        return func(*tree_map(_newest, args), **tree_map(_newest, kwargs))

    def newest(self) -> torch.Tensor:
        """Return a copy of the values.

        Raises:
            InfinityError: their engine is closed, or in the middle of a pass.
            CapacityError: they do not fit in the free host memory. No budget includes them.
        """
        nbytes, free = self.numel() * 4, free_bytes(_CPU)
        if nbytes > free:
            raise CapacityError(
                f"{self._what} needs {format_size(nbytes)} of host memory as one tensor, outside of the budgets, and "
                f"{format_size(free)} are free: read parameter by parameter, with "
                "deepspeed.utils.safe_get_local_fp32_param and its like"
            )
        return self._read()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.newest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.newest().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LiveView({self._what}, numel={self.numel()}, dtype={self.dtype})"


def _newest(value: Any) -> Any:
    return value.newest() if isinstance(value, LiveView) else value


def part_numel(param: nn.Parameter, partition: Partition) -> int:
    """Return the number of the parameter's elements in this rank's shard; all of them if it has no engine."""
    found = owner_of(param)
    if found is None:
        return param.numel()
    place = found[1]
    return sum(part.stop - part.start for part in partition.parts(place.unit, of=place.info))


def part_of_values(param: nn.Parameter, numel: int) -> LiveView:
    """Return this rank's part of a parameter, in its dtype. The view does not keep the parameter alive."""
    reference = weakref.ref(param)

    def read() -> torch.Tensor:
        alive = reference()
        values = None if alive is None else local_values(alive)
        if values is None:
            raise InfinityError("param.ds_tensor: the engine that had the parameter's values is closed")
        return values

    return LiveView("param.ds_tensor", numel, param.dtype, param.device, read)


class _BuiltPart(LiveView):
    """A part of a parameter that has no engine yet. A copy has this rank's own values, and needs no other rank."""

    own: Read

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.own()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.own().__reduce_ex__(protocol)


def part_of_built(param: nn.Parameter) -> LiveView:
    """Return this rank's part of a parameter of `zero.Init` that has no engine yet. The values are rank 0's.

    All parts have the same length; the last is padded with 0. All ranks read it together. The view does not keep the
    parameter alive.
    """
    reference, size = weakref.ref(param), world_size()
    rank, numel = dist.get_rank() if size > 1 else 0, -(-param.numel() // size)

    def read(source: int | None) -> torch.Tensor:
        alive = reference()
        if alive is None:
            raise InfinityError("param.ds_tensor: the parameter is gone")
        values = torch.zeros(numel * size, dtype=alive.dtype, device="cpu")
        values[: alive.numel()] = alive.detach().flatten().cpu()
        if source is not None:
            join_ranks().broadcast(values, source)
        return values[rank * numel : (rank + 1) * numel].to(alive.device)

    part = _BuiltPart("param.ds_tensor", numel, param.dtype, param.device, lambda: read(0))
    part.own = lambda: read(None)
    return part


def flat_values(name: str, params: Iterable[nn.Parameter]) -> LiveView:
    """Return the values of the parameters, concatenated, in the compute dtype."""
    given = list(params)
    first = given[0] if given else torch.empty(0)

    def read() -> torch.Tensor:
        with GatheredParameters(given):
            return torch.cat([param.detach().flatten() for param in given] or [torch.empty(0)])

    return LiveView(name, sum(param.numel() for param in given), first.dtype, first.device, read)


def flat_masters(name: str, params: Iterable[nn.Parameter]) -> LiveView:
    """Return this rank's parts of the float32 masters of the parameters, concatenated."""
    given = tuple(params)
    view = _flat(name, given, lambda param, numel: safe_get_local_fp32_param(param))
    view.parameters = given
    return view


def moments(of: torch.Tensor) -> dict[str, LiveView]:
    """Return the moments of a parameter, or of a flat tensor of masters, as views by name; none for other tensors."""
    if isinstance(of, LiveView):
        return {
            name: _flat(f"optimizer.state[...][{name!r}]", of.parameters, partial(_local_moment, name))
            for name in moment_names(of.parameters)
        }
    if not isinstance(of, nn.Parameter):
        return {}
    return {name: _moment(of, name) for name in moment_names([of])}


def _local_moment(name: str, param: nn.Parameter, numel: int) -> torch.Tensor | None:
    return safe_get_local_optimizer_state(param, name)


def _moment(param: nn.Parameter, name: str) -> LiveView:
    what = f"optimizer.state[...][{name!r}]"

    def read() -> torch.Tensor:
        values = safe_get_full_optimizer_state(param, name)
        if values is None:
            raise InfinityError(f"{what}: the engine that had these values is closed")
        return values

    return LiveView(what, param.shape, torch.float32, param.device, read)


def flat_gradients(name: str, params: Iterable[nn.Parameter]) -> LiveView:
    """Return this rank's parts of the gradients so far in this step, in float32 without the loss scale; 0 for none."""

    def gradient(param: nn.Parameter, numel: int) -> torch.Tensor:
        grad = safe_get_local_grad(param)
        return torch.zeros(numel, device=param.device) if grad is None else grad

    return _flat(name, params, gradient)


def _flat(name: str, params: Iterable[nn.Parameter], of: Part) -> LiveView:
    found = [(param, owner) for param in params if (owner := owner_of(param)) is not None]
    trained = [param for param, (_, place) in found if place.info.trainable]
    if not trained:
        return LiveView(name, 0, torch.float32, _CPU, lambda: torch.empty(0))
    partition = found[0][1][0].begin_gathering(name, stores=False).partition
    numels = [part_numel(param, partition) for param in trained]

    def read() -> torch.Tensor:
        parts = [of(param, numel) for param, numel in zip(trained, numels, strict=True)]
        if any(part is None for part in parts):
            raise InfinityError(f"{name}: the engine that had these values is closed")
        return torch.cat([part for part in parts if part is not None])

    return LiveView(name, sum(numels), torch.float32, trained[0].device, read)
