"""DeepSpeed's interface to parameters under ZeRO-3: `ds_` attributes, `Init`, `GatheredParameters`.

Only this file sets attributes of a model's parameters, because libraries check `hasattr(param, "ds_id")`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity.config import Config, load_config
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.auto_values import check_auto
from infinity.integrations.deepspeed.front import init_distributed
from infinity.integrations.deepspeed.live_views import part_numel, part_of_built, part_of_values
from infinity.integrations.deepspeed.misuse import ModifiedError
from infinity.zero.construction import Init as InFiles
from infinity.zero.construction import convert
from infinity.zero.param_access import GatheredParameters as Gathered
from infinity.zero.param_access import owner_of
from infinity.zero.ranks import join_ranks, world_size
from infinity.zero.sizing import compute_dtype
from infinity.zero.views import version_of

_CAST = (torch.float32, torch.float16, torch.bfloat16)
_ids = count()


@dataclass
class _Look:
    """A parameter without an engine in GatheredParameters: its version after the last allowed change."""

    version: int
    contexts: int = 0


_looks: dict[int, _Look] = {}  # by identity of the parameter


class ZeroParamStatus(Enum):
    """Whether a parameter has its values."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter is stored."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class _Status:
    """The present status of a parameter: it equals the `ZeroParamStatus` at the time of the comparison."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def now(self) -> ZeroParamStatus:
        param = self._param()
        if param is None:
            return ZeroParamStatus.NOT_AVAILABLE
        found = owner_of(param)
        available = id(param) in _looks if found is None else found[0].shows(found[1])
        return ZeroParamStatus.AVAILABLE if available else ZeroParamStatus.NOT_AVAILABLE

    def __eq__(self, other: object) -> bool:
        return self.now() is (other.now() if isinstance(other, _Status) else other)

    def __hash__(self) -> int:
        return hash(self.now())

    def __repr__(self) -> str:
        return repr(self.now())

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled copy has the present status
        return ZeroParamStatus, (self.now().value,)


class _Uses(Collection[int]):
    """The index of the parameter's unit while a pass of the model uses it; otherwise empty."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def _now(self) -> list[int]:
        param = self._param()
        found = None if param is None else owner_of(param)
        if found is None:
            return []
        engine, place = found
        return [place.unit.index] if engine.shows(place) and not engine.lends(place) else []

    def __iter__(self) -> Iterator[int]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def __contains__(self, number: object) -> bool:
        return number in self._now()

    def clear(self) -> None:
        """Do nothing: a use ends by itself."""

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled copy has the present content
        return set, (self._now(),)


class _Summary:
    """`param.ds_summary`: the properties of a parameter in DeepSpeed's messages. Reads no values."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def __call__(self, use_debug_name: bool = False) -> dict[str, Any]:
        """Return sizes and status by DeepSpeed's names. `use_debug_name` has no effect."""
        param: Any = self._param()
        if param is None:
            return {}
        return {
            "id": param.ds_id,
            "status": param.ds_status.now().name,
            "numel": param.numel(),
            "ds_numel": param.ds_numel,
            "shape": tuple(param.shape),
            "ds_shape": tuple(param.ds_shape),
            "requires_grad": param.requires_grad,
            "grad_shape": None if param.grad is None else tuple(param.grad.shape),
            "persist": param.ds_persist,
            "active_sub_modules": set(param.ds_active_sub_modules),
            "ds_tensor.shape": tuple(param.ds_tensor.shape),
        }

    def __reduce__(self) -> tuple[Any, ...]:  # a pickled copy has the present values
        return partial, (dict, self())


def mark(engine: Engine) -> None:
    """Set the attributes that parameters have under ZeRO-3 in DeepSpeed, on the parameters of an engine's model.

    `ds_tensor` is this rank's part, read-only, see [Note: live views]. All ranks read it together.
    """
    partition = engine.begin_gathering("initialize", stores=False).partition
    for param in engine.module.parameters():
        _mark(param)
        if param.numel() > 0:
            param.ds_tensor = part_of_values(param, part_numel(param, partition))  # type: ignore[attr-defined]


def _mark(param: nn.Parameter) -> None:
    if param.numel() == 0:  # there is nothing to divide
        return
    attributes: dict[str, Any] = {
        "ds_id": next(_ids),
        "ds_shape": param.shape,
        "ds_numel": param.numel(),
        "ds_status": _Status(param),
        "ds_persist": False,
        "ds_active_sub_modules": _Uses(param),
        "ds_summary": _Summary(param),
        "is_external_param": False,  # a use by another module is noticed when it happens
    }
    for name, value in attributes.items():
        setattr(param, name, value)


class Init(InFiles):
    """`infinity.zero.Init` with DeepSpeed's arguments. Arguments about the way of its work have no effect.

    Parameters keep their values until `initialize` moves them. They have DeepSpeed's attributes: `ds_status` is not
    available, as in DeepSpeed, so that scripts gather them; `ds_tensor` is this rank's part of rank 0's values,
    read-only, which all ranks read together. At the end of the context, parameters are converted to the configuration's
    precision, or to `dtype`; buffers keep their dtype.

    Raises:
        ConfigError: parameters are to be divided among some ranks only.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **more: Any,
    ) -> None:
        given = {"data_parallel_group": data_parallel_group, "mpu": mpu, **more}
        for name, value in given.items():
            if value not in (None, False):
                raise ConfigError(f"zero.Init: `{name}` is not supported; leave it out, or use infinity.initialize")
        if enabled:
            init_distributed()
        source = config if config is not None else config_dict_or_path
        check_auto(source)
        known = source if source is None or isinstance(source, Config) else load_config(source, world_size=world_size())
        self._dtype = dtype if dtype is not None or known is None else compute_dtype(known)
        # An existing `module` keeps its values until `initialize` moves them.
        super().__init__(known, enabled=enabled)
        self._built: dict[int, weakref.ref[nn.Module]] = {}  # by identity

    def __enter__(self) -> None:
        super().__enter__()
        if self._enabled:
            self._undo.callback(register_module_parameter_registration_hook(self._take).remove)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        built = [module for reference in self._built.values() if (module := reference()) is not None]
        for module in built:
            for name, param in module.named_parameters(recurse=False):
                if type(param) is nn.Parameter and not hasattr(param, "ds_id"):  # at the end, when it has its shape
                    self._finish(param, f"{type(module).__name__}.{name}")
        self._built.clear()

    def _finish(self, param: nn.Parameter, name: str) -> None:
        if self._dtype not in (None, param.dtype) and param.dtype in _CAST and owner_of(param) is None:
            convert(param, self._dtype, self._directory, name)
        _mark(param)
        if param.numel() > 0:
            param.ds_tensor = part_of_built(param)  # type: ignore[attr-defined]

    def _take(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        self._built[id(module)] = weakref.ref(module)  # not the parameter, because `skip_init` replaces it later


class GatheredParameters(Gathered):
    """`infinity.zero.GatheredParameters` with DeepSpeed's arguments. `fwd_module` has no effect.

    Parameters of `zero.Init` without an engine have values on every rank. `initialize` uses rank 0's values, so changes
    of another rank, as `modifier_rank`, are sent to all ranks at the end of the context. Changes without a
    `modifier_rank` are refused at the end, as for an engine's parameters.

    Without `modifier_rank`, nothing is gathered inside a forward or backward pass of the model: there, the engine
    fetches the parameters that an operation reads.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        super().__init__(params, modifier_rank, enabled=enabled)
        if modifier_rank is None:
            self._params = [param for param in self._params if not _is_in_pass(param)]
        self._in_init: list[nn.Parameter] = []

    def __enter__(self) -> None:
        try:
            for param in self._params:
                if hasattr(param, "ds_id") and owner_of(param) is None:
                    self._in_init.append(param)
                    _looks.setdefault(id(param), _Look(version_of(param))).contexts += 1
            super().__enter__()  # last, so that nothing stays gathered after an interrupt
        except BaseException:
            self._end_looks()
            self._in_init = []
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        changed = self._end_looks()
        try:
            if self._in_init and self._modifier_rank:
                self._send(self._modifier_rank, failed=kind is not None)
            if changed and kind is None:
                raise ModifiedError(
                    "in-place modification of a parameter of zero.Init in GatheredParameters without modifier_rank: it "
                    "would count on rank 0 alone. Give modifier_rank=0, whose values every rank gets"
                )
        finally:
            self._in_init = []
            super().__exit__(kind, *error)

    def _end_looks(self) -> bool:
        """End the context for parameters of `zero.Init`. Return whether one was changed without `modifier_rank`."""
        changed = False
        for param in self._in_init:
            look = _looks.get(id(param))
            if look is None:  # an interrupt came before it was added
                continue
            look.contexts -= 1
            if self._modifier_rank is not None:
                look.version = version_of(param)
            elif not look.contexts:
                changed |= look.version != version_of(param)
            if not look.contexts:
                del _looks[id(param)]
        return changed

    def _send(self, source: int, *, failed: bool) -> None:
        ranks = join_ranks()
        if ranks.size == 1 or ranks.any(failed):
            return
        for param in self._in_init:
            values = param.data.cpu()
            ranks.broadcast(values, source)
            param.data.copy_(values)


def _is_in_pass(param: nn.Parameter) -> bool:
    found = owner_of(param)
    return found is not None and isinstance(found[0], Engine) and (found[0].in_forward or found[0].in_backward)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the engine with all parameters gathered, so that generation reads no drive and waits for no rank."""
    with GatheredParameters(model.parameters()):
        yield model


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a use by another module is noticed when it happens."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a use by another module is noticed when it happens."""


# Other names of `deepspeed.runtime.zero.partition_parameters` #

partitioned_param_data_shape = [0]  # shape of DeepSpeed's parameters without values; here they keep their own


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the constructor itself: nothing is converted. transformers temporarily replaces this function."""
    return fn


def is_zero_param(parameter: Any) -> bool:
    """Whether the object has the attributes of a parameter under ZeRO-3."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")
