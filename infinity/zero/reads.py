"""Notices which parameters torch's functions are given, whoever holds them.

A module may read a parameter that is not its own: a tied head (`F.linear(x, self.embedding.weight)`), the output
projection that `nn.MultiheadAttention` never calls as a module. Such a parameter may be away, and no hook of its
owner fires. Torch shows every call of its functions to a `TorchFunctionMode`, and that is where it is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# What asks for a tensor's form and not for its values. Getters (`.dtype`, `.shape`) are told by their name.
_FORM = frozenset(
    {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point}
)
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})  # the getters that lead to the values

Use = Callable[[tuple[int, ...]], Callable[[Any], None]]


class ParameterReads(TorchFunctionMode):
    """While active, `use(units)` is called before any torch function that is given parameters of these units, or
    views of them, and what it returns is called with the function's result.

    One thread's nested activations count as one.
    """

    def __init__(self, unit_of: Mapping[int, int], use: Use) -> None:
        """`unit_of` is by identity of the parameter."""
        super().__init__()
        self._unit_of = unit_of
        self._use = use
        self._depth = _Depth()

    def __enter__(self) -> ParameterReads:
        self._depth.value += 1
        if self._depth.value == 1:
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth.value == 0:
            return  # entered in a thread that an exception has ended
        self._depth.value -= 1
        if self._depth.value == 0:
            super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Be inactive in this thread, whatever line an interrupt has ended."""
        self._depth.value = 0
        if any(mode is self for mode in _get_current_function_mode_stack()):
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)  # to be seen when the compiled code runs, if it calls functions of torch's
        units: dict[int, None] = {}
        self._collect(args, units)
        if kwargs:
            self._collect(kwargs.values(), units)
        if not units or _asks_for_form(func):
            return func(*args, **kwargs)
        used = self._use(tuple(units))
        result = func(*args, **kwargs)
        used(result)
        return result

    def _collect(self, values: Iterable[Any], units: dict[int, None]) -> None:
        """The units of the parameters among the values; layers with many weights pass them in a list."""
        for value in values:
            if isinstance(value, torch.Tensor):
                unit = self._unit_of.get(id(value))
                if unit is None and value._base is not None:
                    unit = self._unit_of.get(id(value._base))
                if unit is not None:
                    units[unit] = None
            elif isinstance(value, (tuple, list)):
                self._collect(value, units)


class _Depth(threading.local):
    """How often this thread has activated the mode: backward may recompute a forward in a thread of its own."""

    value = 0


def _asks_for_form(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ not in _VIEWS
    return name == "__set__" or func in _FORM  # the engine sets `.data`, and must not be asked for it
