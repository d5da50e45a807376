"""Detect which parameters torch's functions read, in any module.

A module may read a parameter of another module: a tied head (`F.linear(x, self.embedding.weight)`), or the output
projection that `nn.MultiheadAttention` never calls as a module. Such a parameter may be evicted, and the hooks of its
own module do not run. This file uses a `TorchFunctionMode`, which torch calls for each of its functions. The mode also
sees functions that change a parameter, directly or through `param.data` and `param.detach()`, which share its memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary

from infinity.zero.unit import Unit

# Functions that read a tensor's metadata and not its values. Getters (`.dtype`, `.shape`) are recognised by name.
_FORM = frozenset(
    {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point}
)
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # the getters that give access to the values

_CHANGE_NO_VALUE = frozenset({"requires_grad_", "detach_", "share_memory_", "retain_grad_"})
_RENORMING = {"embedding": 1, "embedding_bag": 1}  # with `max_norm`, they change the argument at this position

Used = Callable[[Any, Any], None]  # (result, arguments)


class Reader(Protocol):
    """The receiver of `ParameterReads`."""

    def use(self, units: Sequence[Unit], constant: Mapping[int, Unit]) -> Used | None:
        """Called before a torch function that has parameters of these units, or tensors in their memory, as arguments.

        Args:
            constant: units of the parameters, by identity, for which the argument is a tensor that passes no gradient
                on, such as `weight.detach()`.

        Returns:
            A function to call with the result and the arguments; None for none.
        """

    def check_change(self, param: int, unit: Unit) -> None:
        """Called before a torch function changes the parameter with this identity in place."""


class ParameterReads(TorchFunctionMode):
    """While active, reports torch functions that use parameters.

    Activated by `begin` and `end`, not by `with`: backward may recompute a forward in another thread, and each thread
    has its own stack of modes.

    Args:
        unit_of: the unit of each parameter, by the parameter's identity.
        lent: identities of lent parameters, which have values without their unit.
        reader: only weakly referenced: it refers to this object, and a cycle would keep memory until a garbage
            collection.
    """

    def __init__(self, unit_of: Mapping[int, Unit], lent: Container[int], reader: Reader) -> None:
        super().__init__()
        self._unit_of = unit_of
        self._lent = lent
        self._reader = weakref.ref(reader)
        # Tensors in a parameter's memory that torch does not mark as views, with the parameter's identity.
        self._shares = WeakIdKeyDictionary()

    def begin(self) -> bool:
        """Activate the mode in this thread. Return False if it was active, so that only the outer caller ends it.

        There is no counter: an exception between any two lines, also in torch, would leave it wrong. Torch removes a
        mode from its stack while the mode's function runs, and an interrupt then leaves it removed.
        """
        if self in _get_current_function_mode_stack():
            return False
        super().__enter__()  # type: ignore[no-untyped-call]
        return True

    def end(self) -> None:
        """Deactivate the mode in this thread, also after an exception at any line. Other modes stay active."""
        stack = _get_current_function_mode_stack()
        if self in stack:
            above = stack[stack.index(self) + 1 :]
            for _ in range(len(above) + 1):
                _pop_mode()
            for mode in above:
                _push_mode(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # the mode sees the functions that the compiled code calls when it runs
        name = getattr(func, "__name__", "")
        if kwargs or name.endswith("_"):
            for value in _changed_by(name, args, kwargs):
                self._check_change(value)
        units: dict[Unit, None] = {}
        constant: dict[int, Unit] = {}
        self._collect(args, units, constant)
        if kwargs:
            self._collect(kwargs.values(), units, constant)
        if not units or _asks_for_form(func):
            return func(*args, **kwargs)
        reader = self._reader()
        assert reader is not None, "the watch goes on after its reader is gone"
        used = reader.use(tuple(units), constant)
        result = func(*args, **kwargs)
        if used is not None:
            used(result, (args, kwargs))
        # These results share the memory of an argument, but have no `_base`.
        if args and (name == "detach" or (name == "__get__" and func.__self__.__name__ == "data")):
            self._shares[result] = self.parameter_of(args[0])
        return result

    def _check_change(self, value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                self._check_change(item)
        elif isinstance(value, torch.Tensor):
            param = self.parameter_of(value)
            if param is not None:
                reader = self._reader()
                assert reader is not None, "the watch goes on after its reader is gone"
                reader.check_change(param, self._unit_of[param])

    def parameter_of(self, tensor: torch.Tensor) -> int | None:
        """Return the identity of the parameter in whose memory the tensor lies."""
        if id(tensor) in self._unit_of:
            return id(tensor)
        own = tensor if tensor._base is None else tensor._base
        if id(own) in self._unit_of:
            return id(own)
        return self._shares.get(own) if self._shares else None

    def _collect(self, values: Iterable[Any], units: dict[Unit, None], constant: dict[int, Unit]) -> None:
        """Collect the units of the parameters among the values; layers with many weights pass lists."""
        for value in values:
            if isinstance(value, torch.Tensor):
                if id(value) in self._unit_of:
                    param: int | None = id(value)
                else:
                    param = self.parameter_of(value) if value._base is not None or self._shares else None
                if param is not None and param not in self._lent:
                    unit = self._unit_of[param]
                    units[unit] = None
                    if param != id(value) and not value.requires_grad:
                        constant[param] = unit
            elif isinstance(value, (tuple, list)):
                self._collect(value, units, constant)


def _asks_for_form(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ not in _VIEWS
    return name == "__set__" or func in _FORM  # the engine itself sets `.data`


def _changed_by(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that a torch function changes in place; by convention its name ends in one underscore."""
    if "out" in kwargs:
        yield kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGE_NO_VALUE
    if in_place or name == "__setitem__" or kwargs.get("inplace"):
        yield args[0] if args else list(kwargs.values())
    elif name in _RENORMING and kwargs.get("max_norm") is not None:
        yield args[_RENORMING[name]] if len(args) > _RENORMING[name] else kwargs.get("weight")
