"""The only file that registers torch hooks: it turns what torch does into calls of a `Listener`.

[Note: when a unit is in use]
Forward of a module with units opens with `enter` and closes with `leave`. For backward two more events of that
same call are needed. It begins when the first gradient of one of the call's outputs is there (a hook on the outputs).
It is over when autograd runs a node that is older than the call: of the nodes that are ready autograd runs the newest
first, and what a node waits for is newer than the node, so none of the call's own nodes is left by then. Hooks on the
outputs and the inputs of all calls tell which node runs. A call whose inputs come from no node (an embedding, a
checkpoint that begins a graph of its own) is over with autograd's pass if not before, on one rank alone also when all
parameters of its units have their gradients (of several ranks some may have no such gradient). Calls that are recorded
but never begin, such as those of a recomputation, hold nothing.

[Note: nothing of ours in the graph]
A node of ours on a call's inputs would see the end of the call, but also have autograd add up the gradients of an input
within the call before it adds those of other uses. Another order of a sum has other bits, and those would depend on
which modules have units that come and go. Hooks on tensors change no sum.

[Note: which nodes are older]
A node's sequence number says when it was made, as its thread counts. A reentrant checkpoint records and runs a graph
within backward, on a device in another thread than the forward pass: therefore a call is compared only with nodes of
the pass of autograd that it began in.

[Note: uses that no output shows]
Backward may come to a weight before it comes to the call's outputs (a loss that the module keeps in an attribute,
outputs in an object that hides them), or after an older node of another thread. So the result of every function that
was given a parameter of such a unit has a hook as well, and its gradient begins the call again. The same watch finds a
parameter that is not the module's own; its unit joins the call that reads it.

[Note: tensors within a transform]
Inside of `torch.vmap` a module is called with wrappers that say that they need no gradient, while the tensors within
them do: what autograd records, it records for those. So hooks are registered at every level that needs a gradient.

[Note: parameters that forward changes]
`nn.Embedding(max_norm=...)`, a momentum encoder or an initialisation by the first batch change parameters inside of the
forward pass. Of a unit that comes and goes, that would be gone with its memory, so it is refused.

[Note: gradients in parts]
In one backward pass autograd adds all uses of a parameter before it gives the gradient. Not so under reentrant
checkpointing, where every checkpoint is a backward pass of its own: then a unit that several calls use gets
its gradients in parts, and must not be updated before the last. Such calls show in the forward pass: they run without
gradients, to be repeated in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError
from infinity.zero.compiled import is_compiled, left_out
from infinity.zero.coroutines import this_thread
from infinity.zero.outside_units import normalisations
from infinity.zero.partition import HookPoint, Partition, Unit
from infinity.zero.reads import ParameterReads, Used


class Listener(Protocol):
    """What the hooks tell."""

    def enter(self, units: tuple[int, ...]) -> None:
        """The units are about to be used; return when their values are in place."""

    def backward_enter(self, units: tuple[int, ...]) -> None:
        """As `enter`, for the backward of a call; with no units where backward begins."""

    def leave(self, units: tuple[int, ...]) -> None:
        """The use that the matching `enter` or `backward_enter` announced is over; one that raised was none."""

    def backward_left(self, units: tuple[int, ...]) -> None:
        """Backward of one call of the module with these units is over; comes after its `leave`."""

    def gradient_ready(self, unit: int, slot: int, param: nn.Parameter) -> None:
        """`param.grad` holds this backward pass's gradient of the slot."""


@dataclass(slots=True)
class _UnitUses:
    """What the hooks have seen of one unit in the training passes that are running.

    Attributes:
        followed: backward enters and leaves it.
        awaited: the gradients that a backward pass has of it.
        arrived: those that have come in the backward pass that is running.
        calls: of the training forward passes whose backward is to come.
        repeats: one of them ran without gradients, to be repeated in backward.
    """

    followed: bool
    awaited: int
    arrived: int = 0
    calls: int = 0
    repeats: bool = False

    @property
    def is_complete(self) -> bool:
        return self.arrived == self.awaited


class Hooks:
    """Every hook of one engine; `remove` takes them all away.

    Args:
        lent: identities of parameters that lie outside of their units for now.
        alone: no other rank has to see the same events in the same order.
    """

    def __init__(
        self, model: nn.Module, partition: Partition, listener: Listener, lent: Container[int], *, alone: bool
    ) -> None:
        self._model = model
        self._listener = listener
        self._compiled = is_compiled(model)
        self._handles: list[RemovableHandle] = []
        moving = frozenset(chain.from_iterable(p.units for p in partition.hook_points if p.moving))
        self._units = [
            # Backward needs nothing of a unit without elements, which would fill memory with padding.
            _UnitUses(unit.index in moving and _has_elements(unit), sum(slot.trainable for slot in unit.slots))
            for unit in partition.units
        ]
        self._calls: list[_Call] = []
        self._of_thread = _OfThread()
        self._begun = _Begun(listener)
        self._alone = alone
        self._trained: list[tuple[nn.Parameter, int]] = []  # and the key of its hook
        self._counting = False
        unit_of: dict[int, int] = {}
        self._names: dict[int, str] = {}
        for unit in partition.units:
            for index, slot in enumerate(unit.slots):
                param = model.get_parameter(slot.name)
                unit_of[id(param)] = unit.index
                self._names[id(param)] = slot.name
                if slot.trainable:
                    self._watch_parameter(param, unit.index, index)
        self._reads = ParameterReads(unit_of, lent, self)
        for point in partition.hook_points:
            self._watch_module(model.get_submodule(point.module_name), point)
        for module, widened in normalisations(model):  # later than `enter`, which brings the values
            self._handles.append(module.register_forward_pre_hook(widened.lend))
            self._handles.append(module.register_forward_hook(widened.take_back, always_call=True))

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """The model's forward runs inside.

        Args:
            training: backward will follow.
        """
        self._counting = training
        if training:
            self._let_users_hooks_come_first()
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._counting = False

    def in_parts(self) -> frozenset[int]:
        """Units whose gradients of the coming backward pass may come in several parts."""
        return frozenset(unit for unit, each in enumerate(self._units) if each.repeats and each.calls > 1)

    @property
    def in_forward(self) -> bool:
        """This thread is in the forward of a watched module."""
        return bool(self._running)

    @property
    def _running(self) -> list[_Call]:
        """Calls of watched modules, outermost first; those of a coroutine are apart from the others."""
        return self._calls if this_thread.coroutine is None else self._of_thread.calls

    def end_backward(self) -> None:
        """The backward pass is over: end the calls that are left of it, and of passes of autograd's that failed."""
        for each in self._units:
            each.arrived = each.calls = 0
            each.repeats = False
        self._begun.end(lambda call: True)

    def abandon(self) -> None:
        """Forget the calls that are running: an exception has ended them, and torch may not have said so."""
        self._reads.end()
        running = self._running
        while running:
            self._listener.leave(tuple(running.pop().units))

    def remove(self) -> None:
        """Take all hooks away, and let the listener go, which has this object."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            self.end_backward()
        finally:
            self._listener = self._begun.listener = _Nobody()

    # Forward #

    def _watch_module(self, module: nn.Module, point: HookPoint) -> None:
        followed = [unit for unit in point.units if self._units[unit].followed]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # Before the call opens: autograd makes the nodes of views that were changed in place when it is asked.
            inputs = list(_recorded((args, kwargs))) if point.moving and torch.is_grad_enabled() else []
            call = _Call(module, point.units, followed, self._begun)
            self._listener.enter(point.units)
            if self._counting:
                self._count(point.units)
            call.watches = self._reads.begin()
            self._running.append(call)
            call.has_inputs = bool(inputs)
            for tensor in inputs:
                tensor.register_hook(partial(self._begun.end_newer, _node_of(tensor)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            running = self._running
            if not running or running[-1].module is not module:
                return  # an exception before `before`
            call = running.pop()
            if call.watches:
                self._reads.end()
            self._listener.leave(tuple(call.units))
            if not torch.is_grad_enabled():
                return
            if call.followed:
                call.begin_with(output, (args, kwargs))
            if module is self._model:
                self._tell_backward(output, (args, kwargs))

        if self._compiled:
            before, after = left_out(before), left_out(after)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _tell_backward(self, outputs: Any, inputs: Any) -> None:
        """Tell when backward begins, before it gets to any parameter, whoever has begun it."""
        for tensor in _recorded_with_bases(outputs, inputs):
            tensor.register_hook(self._backward_begins)

    def _backward_begins(self, grad: torch.Tensor) -> None:
        self._listener.backward_enter(())

    def use(self, units: tuple[int, ...]) -> Used | None:
        """A torch function is about to read parameters; see [Note: uses that no output shows]."""
        running = self._running
        if not running:
            return None  # an interrupt came before the call was noted, see `abandon`
        call = running[-1]
        for unit in units:
            if unit not in call.units:
                self._listener.enter((unit,))
                call.units.append(unit)
                if self._counting:
                    self._count((unit,))
                if self._units[unit].followed:
                    call.followed.append(unit)
        return call.begin_with if call.followed and torch.is_grad_enabled() else None

    def check_change(self, param: int, unit: int) -> None:
        """The model's forward is about to change a parameter, see [Note: parameters that forward changes]."""
        if self._units[unit].followed:
            raise InfinityError(
                f"the forward pass changes `{self._names[param]}` in place, which would be lost when its unit leaves "
                "memory: change it between two steps in zero.GatheredParameters, or have parameters stay in memory "
                "(zero_optimization.stage 2)"
            )

    def _count(self, units: tuple[int, ...]) -> None:
        """A training forward pass calls a module with these units."""
        for unit in units:
            each = self._units[unit]
            each.calls += 1
            each.repeats |= not torch.is_grad_enabled()

    # Backward #

    def _watch_parameter(self, param: nn.Parameter, unit: int, slot: int) -> None:
        each = self._units[unit]

        def ready(param: torch.Tensor) -> None:
            if param.grad is None:
                return  # a hook of the user's has taken it: to torch there is none in this pass
            self._listener.gradient_ready(unit, slot, param)  # type: ignore[arg-type]
            each.arrived += 1
            if self._alone and each.followed and each.is_complete:
                self._begun.end(lambda call: unit in call.followed and self._is_through(call))

        handle = param.register_post_accumulate_grad_hook(ready)
        self._handles.append(handle)
        self._trained.append((param, handle.id))

    def _let_users_hooks_come_first(self) -> None:
        """What others have registered for `param.grad` since sees it, and may change it, before it leaves.

        torch has no argument for that here, as it has for hooks of modules; it calls them in the order in which they
        came into this table (`move_to_end` would not change that for its own loop, which takes it as a plain dict).
        """
        for param, key in self._trained:
            table = param._post_accumulate_grad_hooks
            if len(table) > 1 and next(reversed(table)) != key:
                table[key] = table.pop(key)

    def _is_through(self, call: _Call) -> bool:
        return not call.has_inputs and all(self._units[unit].is_complete for unit in call.followed)


def _has_elements(unit: Unit) -> bool:
    return any(slot.numel for slot in unit.slots)


class _Nobody:
    """Whom the hooks tell once they are removed."""

    def enter(self, units: tuple[int, ...]) -> None:
        """Nothing is in use any more."""

    backward_enter = leave = backward_left = enter

    def gradient_ready(self, unit: int, slot: int, param: nn.Parameter) -> None:
        """Nobody updates it."""


class _OfThread(threading.local):
    """What runs in this thread, a coroutine of its own."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


BlockEntry = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def watch_blocks(model: nn.Module, partition: Partition, entry: BlockEntry) -> list[RemovableHandle]:
    """Have `entry(index of the block, args, kwargs)` called before a block is, and anything for it is fetched.

    What it returns is what the block is called with.
    """

    def watch(index: int, name: str) -> RemovableHandle:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return entry(index, args, kwargs)

        before = left_out(before) if compiled else before
        return model.get_submodule(name).register_forward_pre_hook(before, prepend=True, with_kwargs=True)

    compiled = is_compiled(model)
    return [watch(index, name) for index, name in enumerate(partition.blocks)]


class _Call:
    """One forward call of a module and its part of the backward pass, see [Note: when a unit is in use].

    The graph holds the call through its hooks, so the call must hold nothing of the graph, which would never be freed.

    Attributes:
        units: what the call has entered so far.
        followed: those of them that backward enters and leaves as well.
        entered: those that its backward has entered.
        first_node: the sequence number of the first autograd node that the call may have made.
        has_inputs: autograd goes on from the call to older nodes.
        watches: the watch on reads began with the call, and ends with it.
    """

    def __init__(self, module: nn.Module, units: Sequence[int], followed: Sequence[int], begun: _Begun) -> None:
        self.module = module
        self.units = list(units)
        self.followed = list(followed)
        self.entered: tuple[int, ...] = ()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.has_inputs = False
        self.watches = False
        self._begun = begun

    def begin_with(self, result: Any, given: Any) -> None:
        """The call's backward begins when a tensor of the result of something that was given these has its gradient.

        What was given and comes back as it was (the position bias that all layers hand on) is none of the call's.
        """
        passed = {id(tensor) for tensor in _tensors(given)}
        for tensor in _recorded_with_bases(result, given):
            node = _node_of(tensor)
            if id(tensor) not in passed or node >= self.first_node:
                tensor.register_hook(partial(self.begin, node))

    def begin(self, node: int, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # the graph of this backward would hold weights that leave memory when it is over
            raise InfinityError(
                "backward with create_graph=True (torch.func's grad is one) goes through units that leave memory or "
                "are divided among ranks, and a second backward would read weights that are gone: train on one rank "
                'with parameters that stay (zero_optimization.offload_param.device "none"), or leave create_graph out'
            )
        self._begun.begin(self, node)


class _Begun:
    """Calls whose backward has begun and is not over.

    Attributes:
        listener: who is told.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._pass_of: dict[_Call, int] = {}  # of autograd's, in which the call has begun

    def begin(self, call: _Call, node: int) -> None:
        """Autograd is about to run this node, which is the call's."""
        self.end_newer(node)  # first, so that two calls that follow each other are not both in memory
        if call in self._pass_of:
            return
        call.entered = tuple(call.followed)
        self.listener.backward_enter(call.entered)
        running = torch._C._current_graph_task_id()
        if running not in self._pass_of.values():
            end = partial(self.end, lambda call: self._pass_of[call] == running)
            torch.autograd.Variable._execution_engine.queue_callback(end)
        self._pass_of[call] = running

    def end_newer(self, node: int, grad: torch.Tensor | None = None) -> None:
        """Autograd is about to run this node: end the calls that are newer, see [Note: which nodes are older]."""
        if self._pass_of:
            running = torch._C._current_graph_task_id()
            self.end(lambda call: self._pass_of[call] == running and call.first_node > node)

    def end(self, is_over: Callable[[_Call], bool]) -> None:
        for call in [call for call in reversed(self._pass_of) if is_over(call)]:  # the inner one of two first
            del self._pass_of[call]
            self.listener.leave(call.entered)
            self.listener.backward_left(call.entered)


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


def _levels(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor and those within it, see [Note: tensors within a transform]."""
    yield tensor
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
        yield tensor


def _recorded(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that autograd has made, at every level."""
    for tensor in _tensors(value):
        for level in _levels(tensor):
            if level.requires_grad and level.grad_fn is not None:
                yield level


def _node_of(tensor: torch.Tensor) -> int:
    """The sequence number of the node that made the tensor, before which autograd calls the tensor's hooks."""
    assert tensor.grad_fn is not None  # it is recorded
    return tensor.grad_fn._sequence_nr()


def _recorded_with_bases(result: Any, given: Any) -> Iterator[torch.Tensor]:
    """As `_recorded`, and what views among the results are views of, unless that was given.

    A view that is changed in place later, as what a linear layer makes of three dimensions (`hidden += residual`), gets
    another history from autograd, in which its own hooks are not and those of its base are.
    """
    yield from _recorded(result)
    bases = [tensor._base for tensor in _tensors(result) if tensor._base is not None]
    if bases:
        known = {id(own): own for tensor in _tensors(given) for own in (tensor, tensor._base)}  # held, so that ids last
        made = {id(base): base for base in bases if id(base) not in known}
        yield from _recorded(list(made.values()))
