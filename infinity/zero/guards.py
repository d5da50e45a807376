"""Adapt the methods of the user's model (`state_dict`, `.to`, copies) to parameters that live in the tiers.

[Note: a method of one module]
torch has no hook for `_apply` (`.to`, `.float`), deep copies and pickling, nor around a whole `state_dict`. An
attribute of a module hides the method of its class, so replacements for these methods are stored in the module's
`__dict__` while it has an engine. Torch is not patched, other modules are not touched, and `remove` leaves no trace. If
the user has already stored a method in the `__dict__`, the replacement calls it, and `remove` restores it.

[Note: what a state dict holds]
If every parameter stays in memory, the entries share the parameters' memory, as in torch. Otherwise all entries are
copies in host memory, because shared memory would change or be freed when units are fetched and evicted. The parameters
are lent while torch collects the entries, so a module's own `_save_to_state_dict` and tied parameters work as in torch.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import starmap
from operator import eq
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError
from infinity.zero.adapters import asks_for_names
from infinity.zero.build import Runtime
from infinity.zero.model_parts import is_distributed
from infinity.zero.outside_reads import GraphPosition, leaves_read_since
from infinity.zero.outside_units import narrow_statistics
from infinity.zero.param_access import (
    LentParams,
    Owner,
    Place,
    by_unit,
    check_room,
    is_lent,
    make_whole,
    unit_values,
    views_of,
)

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_probes = torch.Generator()  # a generator of our own, so that torch's random states do not change


class Guards:
    """The guards of one engine's model, on every module; `remove` removes them.

    Args:
        model: the engine's model.
        owner: the engine. The attribute `owner` is a weak reference to it.
        may_train: identities of frozen parameters that the user may unfreeze.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, owner: Owner, may_train: Collection[int]) -> None:
        self._runtime = runtime
        self.owner = weakref.ref(owner)
        self._model = weakref.ref(model)
        units = runtime.partition.units
        places = [Place(model.get_parameter(s.name), u, i) for u in units for i, s in enumerate(u.params)]
        self._places = {id(place.param): place for place in places}
        self._moves = any(spec.offloaded for spec in runtime.sizing.specs)
        self._saving = False
        self._copying = False
        self._loading: list[tuple[nn.Module, LentParams]] = []
        self._may_train = may_train
        self._shape = _Shape(model, may_train)
        self._handles = self._drop_gradients_left_out()
        self._seams = [_Seam(self, module, root=module is model) for module in model.modules()]

    def remove(self) -> None:
        """Restore the model to plain torch."""
        for seam in self._seams:
            seam.remove()
        for handle in self._handles:
            handle.remove()
        self._seams.clear()
        self._handles.clear()

    def check(self) -> None:
        """Check the model before a training forward.

        Raises:
            InfinityError: a parameter would be used and not trained, or trained and not used; names it.
        """
        self._end_loading()  # an exception may have interrupted a load
        if self._runtime.executor.views.lent_params:
            lent = next(p for p in self._places.values() if is_lent(self._runtime, p))
            raise InfinityError(
                f"parameter `{lent.info.name}` is gathered: leave GatheredParameters before the next training forward"
            )
        if not self._shape.is_kept():
            model = self._model()
            assert model is not None  # it is about to be called
            self._shape = _Shape(model, self._may_train, before=self._shape)

    def check_loss(self, loss: torch.Tensor, since: GraphPosition) -> None:
        """Check the loss before its backward.

        Args:
            since: the end of the forward pass.

        Raises:
            InfinityError: it was computed from a parameter that was not in memory; names it.
        """
        read = self._runtime.executor.views.lent_in_pass
        for leaf in leaves_read_since(loss, since):
            place = self._places.get(id(leaf))
            if place is None or views_of(self._runtime, place).shows() or (place.unit.index, place.index) in read:
                continue
            raise InfinityError(
                f"the loss was computed from `{place.info.name}` outside of the model's forward, where the parameter "
                "is in its tier and reads as NaN: read it in the forward, or inside zero.GatheredParameters"
            )

    def places(self, module: nn.Module, *, recurse: bool = True) -> list[Place]:
        """Return the places of the module's parameters that the engine owns."""
        return [self._places[id(p)] for p in module.parameters(recurse) if id(p) in self._places]

    def _drop_gradients_left_out(self) -> list[RemovableHandle]:
        """Drop gradients of parameters that are not trained, because no budget counts their memory."""
        left = [p for p in self._places.values() if p.param.requires_grad and not p.info.trainable]
        if left and any(p.info.trainable for p in self._places.values()):
            _log.warning(
                "`%s` and %d other parameters require a gradient but are in no parameter group: they are not trained, "
                "and their gradients are dropped. Set requires_grad_(False) to have none computed",
                left[0].info.name,
                len(left) - 1,
            )
        return [place.param.register_post_accumulate_grad_hook(_drop_gradient) for place in left]

    # state_dict and copies #

    @contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        """Collect the module's `state_dict` in this context, with the newest values.

        See [Note: what a state dict holds].
        """
        if self._saving:
            yield
            return
        self._synchronize("model.state_dict()")
        places = self.places(module)
        what = "state_dict", "engine.save_16bit_model and engine.save_checkpoint write one unit at a time"
        with ExitStack() as undo:
            if self._moves:
                divided = any(is_distributed(place.param) for place in places)
                undo.callback(LentParams(self._runtime, places, what, None if divided else _CPU).end)
            else:
                make_whole(self._runtime, places)
            undo.enter_context(self.naming())  # torch calls the `state_dict` of each submodule
            yield

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Collect the entries of a `state_dict` in this context without fetching their values, on this rank alone."""
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving = before

    @contextmanager
    def copying(self, module: nn.Module, memo: dict[int, Any]) -> Iterator[None]:
        """Deep-copy the module in this context: `memo` gets copies of its parameters with the newest values."""
        if self._copying:
            yield
            return
        self._synchronize("copy.deepcopy(model)")
        places = self.places(module)
        if any(is_distributed(place.param) for place in places):
            raise InfinityError("a model that tensor parallelism has divided cannot be copied while it has an engine")
        places = [place for place in places if id(place.param) not in memo and not is_lent(self._runtime, place)]
        if self._moves:
            check_room(self._runtime, places, ("a copy of the model", "copy its state_dict() one module at a time"))
            for group in by_unit(places).values():
                values = unit_values(self._runtime, group[0].unit, [place.index for place in group])
                for place, value in zip(group, values, strict=True):
                    memo[id(place.param)] = nn.Parameter(value, place.param.requires_grad)
        else:
            make_whole(self._runtime, places)
        self._copying = True
        try:
            yield
        finally:
            self._copying = False

    def _synchronize(self, what: str) -> None:
        owner = self.owner()
        if owner is not None:
            self._runtime.together(what)
            owner.finish_updates(what)

    # load_state_dict #

    def begin_loading(self, module: nn.Module) -> None:
        """Lend the module's own parameters, so that torch can write to them."""
        places = self.places(module, recurse=False)
        owner = self.owner()
        if owner is None or not places:
            return
        try:
            if any(is_distributed(place.param) for place in places):
                raise InfinityError(
                    f"`{places[0].info.name}` is a part of a model that tensor parallelism has divided: load it before "
                    "initialize, or with engine.load_checkpoint"
                )
            what = "load_state_dict", "free some, or use engine.load_checkpoint"
            loan = LentParams(owner.begin_gathering(what[0], stores=True), places, what)
        except BaseException:
            self._end_loading()
            raise
        self._loading.append((module, loan))

    def end_loading(self, module: nn.Module) -> None:
        """Store rank 0's loaded values in the tiers."""
        if not self._loading or self._loading[-1][0] is not module:
            return
        try:
            self._loading[-1][1].store()
        except BaseException:
            self._end_loading()
            raise
        self._loading.pop()[1].end()

    def _end_loading(self) -> None:
        """End a failed load. Values that were not stored are dropped."""
        while self._loading:
            self._loading.pop()[1].end()

    # _apply #

    def check_conversion(self, module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Refuse a conversion that would put parameters into memory that the engine does not manage."""
        places = self.places(module)
        if not places:
            return
        param = places[0].param
        # Random values show whether `fn` returns new memory without copying them.
        probe = torch.rand(4, generator=_probes, device="cpu").to(param.device, param.dtype)
        before, was_shared = probe.clone(), probe.is_shared()
        with torch.no_grad():
            result = fn(probe)
        # A copy has no effect: torch makes one for `.to("cpu:0")`.
        if _form(result) == _form(before) and torch.equal(result, before) and probe.is_shared() == was_shared:
            return
        change = f"{_form(probe)} to {_form(result)}" if _form(probe) != _form(result) else "memory of their own"
        raise InfinityError(
            f"`{places[0].info.name}`, like all that this call converts ({change}), lives in the tiers: convert the "
            "model before initialize (.to, .half, .share_memory and similar calls), or convert a copy.deepcopy of it"
        )

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._places


class _Shape:
    """The modules and parameters of the model, and which parameters may require a gradient.

    Args:
        may_train: see `Guards`.
        before: the earlier state. A parameter that was added after it must not require a gradient.
    """

    def __init__(self, model: nn.Module, may_train: Collection[int], before: _Shape | None = None) -> None:
        self._known: dict[int, tuple[nn.Parameter, bool]] = (
            before._known if before is not None else {id(p): (p, p.requires_grad) for p in model.parameters()}
        )
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []  # the module's dict of children, and a copy
        self._parameters: list[tuple[str, dict[str, Any], list[str], list[int]]] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._may_train = may_train
        self._names: dict[str, int] = {} if before is None else before._names
        for prefix, module in model.named_modules():
            path = f"{prefix}." if prefix else ""
            self._children.append((module._modules, dict(module._modules)))
            own = module._parameters
            self._parameters.append((path, own, list(own), [id(param) for param in own.values()]))
            self._look_at(path, {key: param for key, param in own.items() if param is not None})

    def _look_at(self, path: str, parameters: dict[str, nn.Parameter]) -> None:
        for key, param in parameters.items():
            if self._names.setdefault(path + key, id(param)) != id(param) and id(param) in self._known:
                raise InfinityError(
                    f"`{path}{key}` is another parameter than at initialize: a module was tied to another one or "
                    "replaced it. Do this before initialize"
                )
            if id(param) not in self._known and param.requires_grad:
                raise InfinityError(
                    f"parameter `{path}{key}` was added after initialize, so nothing would train it: add it "
                    "before initialize"
                )
            if id(param) not in self._may_train and not (id(param) in self._known and self._known[id(param)][1]):
                self._frozen.append((path + key, param))

    def is_kept(self) -> bool:
        """Whether the model has the same modules and parameters.

        Raises:
            InfinityError: a parameter was replaced, or requires a gradient and did not before; names it.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise InfinityError(
                    f"parameter `{name}` requires a gradient now, did not at initialize and is in no parameter group, "
                    "so nothing trains it: give initialize a group that has it (model_parameters, or an optimizer), or "
                    "call requires_grad_(False) again"
                )
        kept = all(starmap(eq, self._children))
        for path, now, names, before in self._parameters:
            if [*map(id, now.values())] != before:
                kept = False
                self._check_replaced(path, now, dict(zip(names, before, strict=True)))
        return kept

    def _check_replaced(self, path: str, now: dict[str, Any], before: dict[str, int]) -> None:
        for key, param in before.items():
            if param in self._known and id(now.get(key)) != param:
                raise InfinityError(
                    f"parameter `{path}{key}` was replaced, tied to another or removed after initialize, and the "
                    "engine still has the old one: do this before initialize, or change values with load_state_dict or "
                    "GatheredParameters"
                )


class _Seam:
    """The guards of one module, see [Note: a method of one module]. Keeps neither the module nor the engine alive."""

    def __init__(self, guards: Guards, module: nn.Module, *, root: bool) -> None:
        self._guards = weakref.ref(guards)
        self._module = weakref.ref(module)
        self._methods: dict[str, Callable[..., Any]] = {
            "_apply": self.apply,
            "state_dict": self.state_dict,
            "__deepcopy__": self.deepcopy,
            "__reduce_ex__": self.refuse_pickling,
            "compile": self.compile,
        }
        if root:
            self._methods["zero_grad"] = self.zero_grad
        self._before = {name: vars(module)[name] for name in self._methods if name in vars(module)}
        vars(module).update(self._methods)
        self._handles = [module.register_load_state_dict_pre_hook(self.before_load)]
        if module._parameters:
            self._handles.append(module.register_load_state_dict_post_hook(self.after_load))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        module = self._module()
        if module is not None:
            self._uninstall(module)
        self._methods.clear()  # they refer to this object

    def _uninstall(self, module: nn.Module) -> None:
        for name, method in self._methods.items():
            if vars(module).get(name) == method:  # otherwise other code has replaced it
                del vars(module)[name]
                if name in self._before:
                    vars(module)[name] = self._before[name]

    def _of_torch(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method that this guard replaces: the user's on this module, or torch's."""
        if name in self._before:
            return self._before[name](*args, **kwargs)
        return getattr(type(module), name)(module, *args, **kwargs)

    def _both(self) -> tuple[nn.Module, Guards | None]:
        module = self._module()
        assert module is not None  # one of its methods is being called
        return module, self._guards() if self._methods else None  # after `remove`, a replacement may still call it

    # Called by torch and by users #

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        module, guards = self._both()
        if guards is None:
            return self._of_torch(module, "_apply", fn, *args, **kwargs)
        guards.check_conversion(module, fn)
        has = guards.has

        def of_others(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if has(tensor) else fn(tensor)

        return self._of_torch(module, "_apply", of_others, *args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        module, guards = self._both()
        if guards is None:
            return self._of_torch(module, "state_dict", *args, **kwargs)
        with guards.naming() if asks_for_names(sys._getframe(1)) else guards.saving(module):
            return self._of_torch(module, "state_dict", *args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients, also the gradients of a failed pass."""
        module, guards = self._both()
        self._of_torch(module, "zero_grad", *args, **kwargs)
        owner = None if guards is None else guards.owner()
        if owner is not None:
            owner.model_was_zeroed()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the module without the engine's hooks, see [Note: compiled modules]."""
        module, guards = self._both()
        owner = None if guards is None else guards.owner()
        with nullcontext() if owner is None else owner.compiling(module):
            return self._of_torch(module, "compile", *args, **kwargs)

    def deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy without hooks and guards of the engine."""
        module, guards = self._both()
        present = {name: vars(module)[name] for name in self._methods if name in vars(module)}  # ours, or the user's
        self._uninstall(module)
        try:
            if guards is None:
                return copy.deepcopy(module, memo)
            with guards.copying(module, memo):
                copied = _without_hooks(copy.deepcopy(module, memo), module)
                narrow_statistics(copied)
                return copied
        finally:
            if self._methods:  # the engine was not closed meanwhile
                vars(module).update(present)

    def refuse_pickling(self, protocol: object) -> Any:
        raise InfinityError(
            "the model has an engine, and its parameters live in the tiers: pickle (torch.save(model), a process that "
            "is spawned) its state_dict(), or a copy.deepcopy of it"
        )

    def before_load(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        guards = self._guards()
        if guards is None:
            return
        if metadata.get("assign_to_params_buffers"):
            raise InfinityError(
                "load_state_dict(assign=True) would put other parameters into the model, which the engine does not "
                "train: leave assign out; the values are then copied into the tiers"
            )
        guards.begin_loading(module)

    def after_load(self, module: nn.Module, incompatible: Any) -> None:
        guards = self._guards()
        if guards is not None:
            guards.end_loading(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seam:
        return self  # the copied module's hooks refer to it until they are removed


def _without_hooks(module: nn.Module, original: nn.Module) -> nn.Module:
    """Remove this package's hooks, which refer to the engine, from a copied module."""
    tables = [name for name, table in vars(original).items() if "hooks" in name and isinstance(table, dict)]
    ours = {key for name in tables for key, hook in vars(original)[name].items() if _is_of_this_package(hook)}
    for name in tables:
        for key in ours:
            vars(module)[name].pop(key, None)
    return module


def _is_of_this_package(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(__name__.partition(".")[0] + ".")


def _drop_gradient(param: torch.Tensor) -> None:
    param.grad = None


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
