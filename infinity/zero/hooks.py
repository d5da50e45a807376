"""The only file that registers torch hooks: it turns what torch does into calls of a `Listener`.

[Note: when a unit is in use]
Forward of a module with units opens with `enter` and closes with `leave`. For backward two more events of that
same call are needed. It begins when the first gradient of one of the call's outputs is there (a hook on
the outputs), and is over when the gradients of all its inputs are: the inputs pass through an identity node of
their own, so that another module that uses the same tensor does not delay the event. A call whose inputs need no
gradient (an embedding) has no such event and is over with the whole backward pass. Calls that are recorded but
never begin, such as those of a recomputation, hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.zero.partition import Partition


class Listener(Protocol):
    """What the hooks tell."""

    def enter(self, units: tuple[int, ...]) -> None:
        """The units are about to be used; return when their values are in place."""

    def leave(self, units: tuple[int, ...]) -> None:
        """The use that the matching `enter` announced is over."""

    def backward_left(self, units: tuple[int, ...]) -> None:
        """Backward of one call of the module with these units is over; comes after its `leave`."""

    def gradient_ready(self, unit: int, slot: int, param: nn.Parameter) -> None:
        """`param.grad` holds this backward pass's gradient of the slot."""


class Hooks:
    """Every hook of one engine; `remove` takes them all away."""

    def __init__(self, model: nn.Module, partition: Partition, listener: Listener) -> None:
        self._listener = listener
        self._handles: list[RemovableHandle] = []
        self._begun: dict[_Call, None] = {}
        for point in partition.hook_points:
            module = model.get_submodule(point.module_name)
            if point.moving:
                self._watch_module(module, point.units)
            else:
                self._watch_updates(module, point.units)
        for unit in partition.units:
            for index, slot in enumerate(unit.slots):
                if slot.trainable:
                    self._watch_parameter(model.get_parameter(slot.name), unit.index, index)

    def end_backward(self) -> None:
        """The backward pass is over: end the calls that had no event of their own."""
        for call in list(self._begun):
            call.end()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.end_backward()

    def _watch_module(self, module: nn.Module, units: tuple[int, ...]) -> None:
        calls: list[_Call | None] = []  # a stack, since a module may be called recursively

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._listener.enter(units)
            call = _Call(units, self._listener, self._begun) if torch.is_grad_enabled() else None
            calls.append(call)
            return None if call is None else _mark_inputs(call, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = calls.pop() if calls else None
            if call is not None:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(call.begin)
            self._listener.leave(units)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _watch_updates(self, module: nn.Module, units: tuple[int, ...]) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._listener.enter(units)
            self._listener.leave(units)

        self._handles.append(module.register_forward_pre_hook(before))

    def _watch_parameter(self, param: nn.Parameter, unit: int, slot: int) -> None:
        def ready(param: torch.Tensor) -> None:
            self._listener.gradient_ready(unit, slot, param)  # type: ignore[arg-type]

        self._handles.append(param.register_post_accumulate_grad_hook(ready))


class _Call:
    """One forward call's part of the backward pass, see [Note: when a unit is in use]."""

    def __init__(self, units: tuple[int, ...], listener: Listener, begun: dict[_Call, None]) -> None:
        self._units = units
        self._listener = listener
        self._begun = begun

    def begin(self, grad: torch.Tensor) -> None:
        if self not in self._begun:
            self._listener.enter(self._units)
            self._begun[self] = None

    def end(self) -> None:
        if self in self._begun:
            del self._begun[self]
            self._listener.leave(self._units)
            self._listener.backward_left(self._units)


class _EndOfBackward(torch.autograd.Function):
    """Identity on a call's inputs whose backward runs when all their gradients are known."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.call.end()
        return None, *grads


def _mark_inputs(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Route the inputs that need a gradient through one `_EndOfBackward`; None leaves them as they are.

    Inputs inside nested containers are not rerouted, and then none is: an end that comes before the nested ones'
    gradients would be too early, and the end of the backward pass is only late.
    """
    values = [*args, *kwargs.values()]
    nested = [v for v in values if not isinstance(v, torch.Tensor)]
    if any(tensor.requires_grad for tensor in _tensors(nested)):
        return None
    marked = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not marked:
        return None
    outputs = _EndOfBackward.apply(call, *(values[i] for i in marked))  # type: ignore[no-untyped-call]
    for index, output in zip(marked, outputs, strict=True):
        values[index] = output
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested tuples, lists and mappings (model outputs are mappings)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
