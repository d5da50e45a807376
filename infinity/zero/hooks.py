"""Turn torch's events into calls of a `Listener`. No other file registers torch hooks.

[Note: when a unit is in use]
The forward of a module with units begins with `enter` and ends with `leave`. The backward of the same call needs two
more events. It begins when one of the call's outputs gets its first gradient (a hook on the outputs). It is over when
autograd runs a node that is older than the call: autograd runs the newest ready node first, and a node waits only for
newer ones, so no node of the call remains then. Hooks on the outputs and inputs of all calls show which node runs. If
a call's inputs have no autograd node (an embedding, a checkpoint with its own graph), no older node follows. Such a
call ends at the end of autograd's pass. On a single rank, it ends earlier, when all parameters of its units have their
gradients; on several ranks this is not possible, because different parameters may get gradients. Calls whose backward
never begins, such as the calls of a recomputation, pin nothing.

[Note: nothing of ours in the graph]
An autograd node of our own, at the inputs of a call, would also run at the end of the call's backward. But with this
node, autograd would first sum the gradients of an input within the call, and then add the gradients of its other uses.
A sum in another order has other bits, which would then depend on the units that can be evicted. Hooks on tensors do not
change the order.

[Note: which nodes are older]
A node's sequence number gives its age, counted by the thread that made it. A reentrant checkpoint records and runs a
graph within backward, on a device in another thread than the forward pass. So a call is compared only with nodes of the
autograd pass in which it began.

[Note: uses that no output shows]
Backward may reach a weight before it reaches the call's outputs (a loss that the module keeps in an attribute, outputs
in an object that hides them), or after an older node of another thread. So the result of every function with such a
parameter as argument also has a hook, and its gradient begins the call again. `ParameterReads` also finds parameters of
other modules; their units join the call that reads them.

[Note: tensors within a transform]
Inside `torch.vmap`, a module gets wrapper tensors with `requires_grad` False. Autograd records the operations on the
tensors inside them. So hooks are registered at every level that requires a gradient.

[Note: parameters that forward changes]
`nn.Embedding(max_norm=...)`, a momentum encoder or an initialisation by the first batch change parameters in the
forward pass. The eviction of the unit would lose such a change, so it is refused for units that can be evicted.

[Note: gradients in parts]
In one backward pass autograd sums all uses of a parameter before it delivers the gradient. Under reentrant
checkpointing, every checkpoint is a backward pass of its own, so a unit that several calls use gets its gradients in
parts, and must not be updated before the last part. The forward pass shows such calls: they run in the forward of an
autograd function, which backward repeats. (Torch also disables forward-mode gradients in such a function, unlike in
`no_grad`.) The forward pass does not show passes that a hook or a function of the user runs within backward. So after a
gradient from an inner pass, more gradients may come, unless the unit is called once: by a module that checkpoints
within its forward, or whose call a checkpoint repeats.

[Note: values without a gradient]
A parameter has its last gradient when backward has run all functions that pass a gradient to it. A function with the
argument `weight.detach()` or `weight.data` passes none, and its backward may read the values later. A checkpoint may
read values under `no_grad`, and reads them again when backward repeats it. So the units of such parameters are updated
at the end of backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from infinity.errors import InfinityError
from infinity.zero.compiled import is_compiled, left_out
from infinity.zero.coroutines import this_thread
from infinity.zero.one_thread import OneThread
from infinity.zero.outside_units import normalisations
from infinity.zero.partition import Partition
from infinity.zero.reads import ParameterReads, Used
from infinity.zero.unit import Unit, UnitCalls

_NOT_TRACED = (
    "torch.jit.trace (and torch.onnx.export, which may use it) cannot trace a model whose parameters leave memory: it "
    "keeps the tensors that parameters are during the call. Load the weights (engine.module.state_dict(), or the files "
    "of engine.save_16bit_model) into a model without an engine, and trace that model"
)

_Hook = Callable[..., Any]


class Listener:
    """The receiver of the hooks' events; this one ignores them."""

    def enter(self, units: tuple[Unit, ...]) -> None:
        """Called before a use of the units; returns when their values are in place."""

    def backward_enter(self, units: tuple[Unit, ...]) -> None:
        """Called like `enter`, for the backward of a call; with no units at the start of a backward pass."""

    def leave(self, units: tuple[Unit, ...], *, ends_forward: bool = False) -> None:
        """Called at the end of a use after `enter` or `backward_enter`, unless that raised.

        Args:
            ends_forward: whether it is the end of the outermost forward call of a watched module.
        """

    def backward_left(self, units: tuple[Unit, ...]) -> None:
        """Called when backward has left one call of the module with these units, after `leave`."""

    def in_parts(self, unit: Unit, index: int, *, again: bool) -> None:
        """Called before `gradient_ready` if more gradients of the unit may come before backward ends.

        Args:
            again: whether this parameter has already had a gradient in this backward pass.
        """

    def gradient_ready(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        """Called when `param.grad` holds this backward pass's gradient."""


class Hooks:
    """All hooks of one engine; `remove` removes them.

    Args:
        units: all units, by index.
        lent: identities of lent parameters.
        alone: whether there is one rank, so that events need not come in the same order as on other ranks.

    Attributes:
        thread: the thread that runs the model's forward.
        left_out_of_compile: whether torch leaves the hooks out when it compiles a module, see compiled.py.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        units: Sequence[Unit],
        listener: Listener,
        lent: Container[int],
        *,
        alone: bool,
    ) -> None:
        self._model = model
        self.thread = OneThread()
        self._listener = listener
        self.left_out_of_compile = is_compiled(model)
        self._handles: list[RemovableHandle] = []
        self._units = units
        self._calls: list[_Call] = []
        self._thread_calls = _ThreadCalls()
        self._begun = _BegunCalls(listener)
        self._alone = alone
        self._trained: list[tuple[nn.Parameter, dict[int, _Hook]]] = []  # each parameter with its hook, by key
        self._trained_ids: set[int] = set()
        self._counting = False
        self._outermost: int | None = None  # autograd's number of the running backward pass
        self._unit_of: dict[int, Unit] = {}  # by identity of the parameter
        self._names: dict[int, str] = {}
        moving = frozenset(chain.from_iterable(p.units for p in partition.hook_points if p.moving))
        for unit in units:
            # Backward needs no values of a unit without elements. A fetch of it would fill memory with padding.
            followed = unit.index in moving and any(info.numel for info in unit.layout.params)
            unit.calls = UnitCalls(followed)
            for index, info in enumerate(unit.layout.params):
                param = model.get_parameter(info.name)
                self._unit_of[id(param)] = unit
                self._names[id(param)] = info.name
                if info.trainable:
                    self._watch_parameter(param, unit, index)
        self._reads = ParameterReads(self._unit_of, lent, self)
        ends: dict[nn.Module, dict[int, _Hook]] = {}  # our hooks after forward by key, in their order
        for point in partition.hook_points:
            of_module, module = tuple(units[i] for i in point.units), model.get_submodule(point.module_name)
            ends[module] = self._watch_module(module, of_module, moving=point.moving)
        for module, widened in normalisations(model):  # after `enter`, which brings the values
            self._handles.append(module.register_forward_pre_hook(widened.lend))
            self._handles.append(module.register_forward_hook(widened.take_back, always_call=True))
            ends.get(module, {})[self._handles[-1].id] = widened.take_back

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Run the model's forward inside.

        Args:
            training: whether a backward pass will follow.
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

    def in_parts(self) -> frozenset[Unit]:
        """Return units that must not be updated before the end of the coming backward pass.

        Their gradients may come in several parts, or backward may read their values after the last of them.
        """
        return frozenset(
            unit for unit in self._units if unit.calls.constant or (unit.calls.repeats and unit.calls.forward > 1)
        )

    @property
    def in_forward(self) -> bool:
        """Whether this thread is in the forward of a watched module."""
        return bool(self._running)

    @property
    def _running(self) -> list[_Call]:
        """Calls of watched modules, outermost first; a coroutine has its own list."""
        return self._calls if this_thread.coroutine is None else self._thread_calls.calls

    def end_backward(self) -> None:
        """End all calls of this backward pass, and of failed autograd passes."""
        for unit in self._units:
            unit.calls.end_backward()
        self._outermost = None
        self._begun.end_all()

    def abandon(self) -> None:
        """Leave the running calls after an exception: torch may not have called their hooks."""
        self._reads.end()
        running = self._running
        while running:
            call = running.pop()
            if call.claims:
                self.thread.release()
            self._listener.leave(tuple(call.units), ends_forward=not running)

    def remove(self) -> None:
        """Remove all hooks, and the reference to the listener, which refers to this object."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._trained.clear()  # its hooks refer to this object
        self._reads.end()  # in the middle of a forward pass, the removed hooks would have ended it
        try:
            self.end_backward()
        finally:
            self._listener = self._begun.listener = Listener()

    # Forward #

    def _watch_module(self, module: nn.Module, units: tuple[Unit, ...], *, moving: bool) -> dict[int, _Hook]:
        """Watch the module's calls.

        The user's hooks run between `before` and `after`, because they may read the module's parameters: such reads
        then belong to this call, and not to its caller's.

        Returns:
            The hooks that stay the last after the module's forward, by key; the caller may append some.
        """
        followed = [unit for unit in units if unit.calls.followed]
        ends: dict[int, _Hook] = {}

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if moving and torch._C._is_tracing():
                raise InfinityError(_NOT_TRACED)
            if self._handles:
                _move_to_end(module._forward_hooks, ends)  # the user may have registered hooks since
            # First: asking for the node of a view that was changed in place makes autograd create it.
            inputs = _recorded(_tensors(args, kwargs)) if moving and torch.is_grad_enabled() else []
            call = _Call(module, units, followed, self._begun)
            running = self._running
            is_inner = bool(running) and running[-1].thread == call.thread  # the outermost call holds the claim
            call.claims = not is_inner and self.thread.claim()
            try:
                self._listener.enter(units)
            except BaseException:
                if call.claims:
                    self.thread.release()
                raise
            self._count(units)
            call.watches = self._reads.begin()
            running.append(call)
            call.has_inputs = bool(inputs)
            for tensor in inputs:
                tensor.register_hook(partial(self._begun.end_newer, _node_of(tensor)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            running = self._running
            if not running or running[-1].module is not module or running[-1].thread != threading.get_ident():
                return  # an exception came before `before`
            call = running.pop()
            if call.claims:
                self.thread.release()
            if call.watches:
                self._reads.end()
            self._listener.leave(tuple(call.units), ends_forward=not running)
            if not running:
                self._refuse_views(output)
            if not torch.is_grad_enabled():
                return
            if call.followed:
                call.begin_with(output, (args, kwargs))
            if module is self._model:
                for tensor in _recorded_with_bases(output, (args, kwargs)):
                    tensor.register_hook(self._backward_begins)

        if self.left_out_of_compile:
            before, after = left_out(before), left_out(after)
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        ends[self._handles[-1].id] = after
        return ends

    def _refuse_views(self, output: Any) -> None:
        """Refuse a result in the memory of a unit that can be evicted: a later read would crash the process."""
        for tensor in _tensors(output):
            param = self._reads.parameter_of(tensor)
            if param is not None and param != id(tensor) and self._unit_of[param].offloaded:
                raise InfinityError(
                    f"the model returns a view of `{self._names[param]}` (or its detach() or data), whose memory is "
                    "freed when its unit leaves memory: return a copy (clone()), or have parameters stay in memory "
                    "(zero_optimization.stage 2)"
                )

    def _backward_begins(self, grad: torch.Tensor) -> None:
        """Report the start of any backward pass before it reaches a parameter."""
        self._listener.backward_enter(())
        self._note_pass()

    def _note_pass(self) -> None:
        """Record autograd's number of the running pass, if one runs. Inner passes have higher numbers."""
        running = torch._C._current_graph_task_id()
        if running >= 0 and (self._outermost is None or running < self._outermost):
            self._outermost = running

    def use(self, units: Sequence[Unit], constant: Mapping[int, Unit]) -> Used | None:
        """Enter units whose parameters a torch function is about to read; see [Note: uses that no output shows]."""
        running = self._running
        if not running:
            return None  # an interrupt came before the call was recorded, see `abandon`
        call = running[-1]
        if self._counting and not torch.is_inference_mode_enabled():
            for param, unit in constant.items():
                if param in self._trained_ids:
                    unit.calls.constant |= torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled()
        for unit in units:
            if unit not in call.units:
                self._listener.enter((unit,))
                call.units.append(unit)
                self._count((unit,))
                if unit.calls.followed:
                    call.followed.append(unit)
        return call.begin_with if call.followed and torch.is_grad_enabled() else None

    def check_change(self, param: int, unit: Unit) -> None:
        """Refuse a change by the model's forward that would be lost, see [Note: parameters that forward changes]."""
        if unit.calls.followed:
            raise InfinityError(
                f"the forward pass changes `{self._names[param]}` in place, which would be lost when its unit leaves "
                "memory: change it between two steps in zero.GatheredParameters, or have parameters stay in memory "
                "(zero_optimization.stage 2)"
            )

    def _count(self, units: Sequence[Unit]) -> None:
        """Count a call of a module with these units, see [Note: gradients in parts]."""
        records = torch.is_grad_enabled()
        if self._counting:
            if not records and (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()):
                if _may_be_repeated():
                    for unit in units:
                        unit.calls.constant = True
                return  # this use passes no gradient to them
            for unit in units:
                unit.calls.forward += 1
                unit.calls.repeats |= not records
        elif records and torch._C._current_graph_task_id() >= 0:
            self._note_pass()  # a backward pass within this one may follow
            for unit in units:
                unit.calls.within += 1

    # Backward #

    def _watch_parameter(self, param: nn.Parameter, unit: Unit, index: int) -> None:
        calls = unit.calls

        def ready(param: torch.Tensor) -> None:
            if param.grad is None:
                return  # a user's hook has removed it: for torch, the parameter has no gradient in this pass
            # See [Note: gradients in parts].
            running = torch._C._current_graph_task_id()
            if running != self._outermost:
                self._note_pass()
            again = index in calls.had
            calls.had.add(index)
            if again or (running != self._outermost and not calls.is_one):
                self._listener.in_parts(unit, index, again=again)
            self._listener.gradient_ready(unit, index, param)  # type: ignore[arg-type]
            calls.gradients += 1
            if self._alone and calls.followed and calls.gradients == unit.total.trained:
                self._begun.end_through(unit)

        handle = param.register_post_accumulate_grad_hook(ready)
        self._handles.append(handle)
        self._trained.append((param, {handle.id: ready}))
        self._trained_ids.add(id(param))

    def _let_users_hooks_come_first(self) -> None:
        """Move our hooks behind newer hooks on `param.grad`, so that these can see and change it first.

        Unlike hooks of modules, these have no `prepend` argument.
        """
        for param, ours in self._trained:
            if param._post_accumulate_grad_hooks.keys() != ours.keys():
                _move_to_end(param._post_accumulate_grad_hooks, ours)


def _move_to_end(table: dict[int, _Hook], ours: dict[int, _Hook]) -> None:
    """Move our hooks to the end of torch's table, in their order.

    torch calls hooks in order of insertion, and its own loops take the table as a plain dict, so
    `OrderedDict.move_to_end` would have no effect. An interrupt may leave a hook out, until the next call.
    """
    if next(reversed(table), None) != next(reversed(ours)):
        for key, hook in ours.items():
            table.pop(key, None)
            table[key] = hook


def _may_be_repeated() -> bool:
    """Whether backward may run the current code again: a non-reentrant checkpoint sets hooks on saved tensors."""
    hooks_on_top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if hooks_on_top is None:
        return True  # unknown before torch 2.8
    hooks = hooks_on_top(True)
    return hooks is not None and not hooks[0].__module__.startswith("infinity.")


class _ThreadCalls(threading.local):
    """The calls of a thread that runs one coroutine."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


BlockEntry = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def watch_blocks(model: nn.Module, partition: Partition, entry: BlockEntry) -> list[RemovableHandle]:
    """Call `entry(index of the block, args, kwargs)` before each block, and before any of its units is fetched.

    The block is called with the returned arguments.
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

    The graph holds the call through its hooks. A reference back to the graph would keep it alive forever.

    Attributes:
        units: units that the call has entered so far.
        followed: the `followed` units among them, see `UnitCalls`.
        entered: units that its backward has entered.
        first_node: sequence number of the first autograd node that the call may have created.
        has_inputs: whether autograd continues from the call to older nodes.
        watches: whether `ParameterReads` was activated for the call, and must be deactivated at its end.
        claims: whether the call's thread holds the model until the call ends.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], followed: Sequence[Unit], begun: _BegunCalls) -> None:
        self.module = module
        self.units = list(units)
        self.followed = list(followed)
        self.entered: tuple[Unit, ...] = ()
        self.first_node = torch._C._autograd._get_sequence_nr()
        self.has_inputs = False
        self.watches = False
        self.thread = threading.get_ident()
        self.claims = False
        self._begun = begun

    @property
    def is_through(self) -> bool:
        """Whether nothing older follows in autograd, and all gradients of its units have come."""
        return not self.has_inputs and all(unit.calls.gradients == unit.total.trained for unit in self.followed)

    def begin_with(self, result: Any, given: Any) -> None:
        """Begin the call's backward at the first gradient of a tensor in the result of a function with these arguments.

        An argument that is returned unchanged (a position bias that all layers pass on) does not belong to the call.
        """
        for tensor in _recorded_with_bases(result, given):
            node = _node_of(tensor)
            if node >= self.first_node or all(tensor is not passed for passed in _tensors(given)):
                tensor.register_hook(partial(self.begin, node))

    def begin(self, node: int, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():  # the graph of this backward would hold weights that are evicted at its end
            raise InfinityError(
                "backward with create_graph=True (torch.func's grad is one) goes through units that leave memory or "
                "are divided among ranks, and a second backward would read freed weights: train on one rank with "
                'parameters that stay (zero_optimization.offload_param.device "none"), or leave create_graph out'
            )
        self._begun.begin(self, node)


class _BegunCalls:
    """Calls whose backward has begun and is not over.

    Attributes:
        listener: gets the events.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._pass_of: dict[_Call, int] = {}  # the autograd pass in which the call has begun

    def begin(self, call: _Call, node: int) -> None:
        """Begin a call. Autograd is about to run `node`, which belongs to it."""
        self.end_newer(node)  # first: two successive calls must not both be in memory
        if call in self._pass_of:
            return
        call.entered = tuple(call.followed)
        self.listener.backward_enter(call.entered)
        running = torch._C._current_graph_task_id()
        if running not in self._pass_of.values():
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_pass, running))
        self._pass_of[call] = running

    def end_newer(self, node: int, grad: torch.Tensor | None = None) -> None:
        """End calls newer than the node that autograd is about to run, see [Note: which nodes are older]."""
        if self._pass_of:
            running = torch._C._current_graph_task_id()
            self._end([call for call, begun in self._pass_of.items() if begun == running and call.first_node > node])

    def end_through(self, unit: Unit) -> None:
        """End the unit's calls that are through."""
        self._end([call for call in self._pass_of if unit in call.followed and call.is_through])

    def end_all(self) -> None:
        self._end(list(self._pass_of))

    def _end_pass(self, number: int) -> None:
        self._end([call for call, begun in self._pass_of.items() if begun == number])

    def _end(self, calls: Sequence[_Call]) -> None:
        for call in reversed(calls):  # inner calls first
            del self._pass_of[call]
            self.listener.leave(call.entered)
            self.listener.backward_left(call.entered)


def _tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and mappings (model outputs are mappings), in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(*value)
        elif isinstance(value, Mapping):
            found += _tensors(*value.values())
    return found


def _recorded(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those tensors that have an autograd node, at every level, see [Note: tensors within a transform]."""
    found = []
    for tensor in tensors:
        level: torch.Tensor | None = tensor
        while level is not None:
            if level.requires_grad and level.grad_fn is not None:
                found.append(level)
            level = get_unwrapped(level) if is_functorch_wrapped_tensor(level) else None
    return found


def _node_of(tensor: torch.Tensor) -> int:
    """Return the sequence number of the tensor's node; autograd calls the tensor's hooks before it runs this node."""
    assert tensor.grad_fn is not None  # the tensor is recorded
    return tensor.grad_fn._sequence_nr()


def _recorded_with_bases(result: Any, given: Any) -> list[torch.Tensor]:
    """Return the tensors of `_recorded`, and the bases of views in the result that are not in `given`.

    If a view is changed in place later, such as a linear layer's output (`hidden += residual`), autograd gives it a new
    history. This history has the hooks of the base, but not the view's own.
    """
    tensors = _tensors(result)
    found = _recorded(tensors)
    bases = [tensor._base for tensor in tensors if tensor._base is not None]
    if bases:
        known = {id(own): own for tensor in _tensors(given) for own in (tensor, tensor._base)}  # held: no id is reused
        found += _recorded([base for base in {id(base): base for base in bases}.values() if id(base) not in known])
    return found
