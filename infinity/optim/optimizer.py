"""The optimizer object for a training loop and its LR scheduler. The engine runs the updates."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.kernels import Rule
from infinity.optim.kinds import ADAM, OptimizerKind
from infinity.optim.loss_scale import LossScale

_log = logging.getLogger(__name__)

ParamsOrGroups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


def check_no_states(state_dict: Mapping[str, Any]) -> None:
    """Refuse a `state_dict` that has moments, which would be ignored."""
    states = state_dict.get("state")
    if states:
        raise ConfigError(
            f"load_state_dict: the states (moments, step counts) of {len(states)} parameters would be ignored, because "
            "the engine keeps states in its tiers: engine.load_checkpoint restores them, and `infinity checkpoint "
            "import` converts checkpoints of DeepSpeed and torch.distributed. To continue with fresh states, pass "
            '{"param_groups": ...} alone'
        )


class TieredOptimizer(torch.optim.Optimizer):
    """`param_groups` of a model whose states are in the tiers.

    Every group has the hyper-parameters of its kind. Groups of Adam also have `decoupled`: True for the weight decay of
    AdamW, False for that of Adam. Hyper-parameters may be changed between steps, by hand or by any torch LR scheduler.

    Attributes:
        kind: the kind of optimizer.
        trained: group of every parameter that an engine trains, by name.
        frozen: group of every other parameter, by name. These parameters required no gradient and have no states.
        loss_scaler: the engine's loss scale in fp16 training; otherwise its `value` is 1.
        run_step: implementation of `step()`; drop_gradients: of `zero_grad()`. The engine sets them.
    """

    # Identities of the engine's parameters, by group. A class attribute, because torch's constructor adds groups.
    _kept: list[list[int]] | None = None

    def __init__(self, params: ParamsOrGroups, defaults: Mapping[str, Any], kind: OptimizerKind = ADAM) -> None:
        super().__init__(params, {**kind.defaults, **defaults})  # type: ignore[arg-type]
        self.kind = kind
        self.run_step: Callable[[], object] | None = None
        self.drop_gradients: Callable[[], None] | None = None
        self.loss_scaler = LossScale.of(None)
        self.trained: dict[str, int] = {}
        self.frozen: dict[str, int] = {}
        self._without_states: list[tuple[str, nn.Parameter]] = []

    def bind(self, model: nn.Module, trained: Mapping[str, int], frozen: Mapping[str, int]) -> None:
        """Set the trained and the frozen parameters of the groups, by their names in the model."""
        self.trained, self.frozen = dict(trained), dict(frozen)
        self._without_states = [(name, model.get_parameter(name)) for name in frozen]
        for index, group in enumerate(self.param_groups):
            group["params"] = [model.get_parameter(name) for name, member in trained.items() if member == index]

    def keep_groups(self) -> None:
        """Fix the parameters of the groups, because an engine trains them now. Hyper-parameters may still change."""
        self._kept = self._members()

    def _members(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def check_groups(self) -> None:
        """Check that the groups have the parameters for which the engine created states.

        Raises:
            InfinityError: a group was added or removed, or has other parameters.
        """
        if self._kept is None or (members := self._members()) == self._kept:
            return
        if len(members) != len(self._kept):
            change = (
                f"there are {len(members)} parameter groups, and were {len(self._kept)} when initialize made states"
            )
        else:
            index = next(i for i, (now, then) in enumerate(zip(members, self._kept, strict=True)) if now != then)
            change = f"parameter group {index} has other parameters than when initialize made states"
        raise InfinityError(
            f"{change}: form groups before initialize (model_parameters, or an optimizer). To pause the training of "
            "parameters, call requires_grad_(False) on them; hyper-parameters of a group may change at any time"
        )

    def unfrozen(self) -> list[str]:
        """Return the names of the parameters without states that now require a gradient."""
        return [name for name, param in self._without_states if param.requires_grad]

    def check_frozen(self) -> None:
        """Check that no parameter without states requires a gradient, in passes that call the model directly.

        Raises:
            InfinityError: a parameter does. The message names it.
        """
        for name in self.unfrozen():
            raise InfinityError(
                f"parameter `{name}` requires a gradient since the last forward pass of the engine, and the engine "
                "creates its states in a forward pass: call the engine, not its model, for the next forward pass"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, before an engine trains the groups.

        Raises:
            InfinityError: an engine trains the groups.
        """
        if self._kept is not None:
            raise InfinityError(
                "add_param_group after initialize, which has already made states: give initialize all groups "
                "(model_parameters, or an optimizer), and freeze parameters that train later by requires_grad_(False)"
            )
        super().add_param_group(param_group)

    @property
    def trains(self) -> bool:
        """Whether there are parameters to train; False if the engine was made without an optimizer."""
        return any(group["params"] for group in self.param_groups)

    def check_trains(self) -> None:
        """Refuse to train with an engine that was made without an optimizer."""
        if not self.trains:
            raise InfinityError(
                "this engine has no optimizer: it evaluates and generates only. Give initialize an optimizer, or the "
                "configuration an optimizer section"
            )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Run the engine's step. The engine's `step()` calls this, so that torch's LR schedulers see the call."""
        if closure is not None:
            raise ConfigError("closures need several backward passes a step; call engine.backward() and engine.step()")
        self.check_trains()
        if self.run_step is None:
            raise InfinityError("this optimizer belongs to no engine; use the one that infinity.initialize returns")
        self._opt_called = True
        self.run_step()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # so that schedulers do not wrap it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step in progress. After `step()` there are none.

        Raises:
            InfinityError: with the update schedule `backward`, they have already updated parameters.
        """
        if self.drop_gradients is not None:
            self.drop_gradients()

    @property
    def loss_scale(self) -> float:
        """The factor on losses before backward."""
        return self.loss_scaler.value

    cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether a backward pass must begin with `engine.backward(loss)` or `engine.scale(loss)`."""
        return self.loss_scaler.needed

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale depends on the gradients."""
        return self.loss_scaler.dynamic

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because its gradients were not finite."""
        return self.loss_scaler.overflow

    def share_groups(self, given: torch.optim.Optimizer) -> None:
        """Share the group dicts with the user's optimizer `given`.

        Changes by its schedulers then take effect here, too. While an engine trains its parameters, `given` refuses
        `load_state_dict`, which would replace the dicts.
        """
        for group, own in zip(given.param_groups, self.param_groups, strict=True):
            group.update(own)
        self.param_groups[:] = given.param_groups
        given.register_load_state_dict_pre_hook(partial(_refuse_loading, weakref.ref(self)))

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' hyper-parameters; `engine.save_checkpoint` saves the states."""
        return {"param_groups": [self._hyper_parameters(group) for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the hyper-parameters of a `state_dict()`. Moments do not change, and a warning says so.

        Raises:
            ConfigError: the `state_dict` has moments, as those of torch's optimizers have, or another number of groups.
        """
        check_no_states(state_dict)
        self.load_groups(state_dict)
        _log.warning(
            "optimizer.load_state_dict has set hyper-parameters only: moments and step counts are saved and restored "
            "by engine.save_checkpoint and engine.load_checkpoint"
        )

    def load_groups(self, state_dict: Mapping[str, Any]) -> None:
        """Load hyper-parameters, without a warning about moments.

        Raises:
            ConfigError: the `state_dict` has another number of groups.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state has {len(groups)} parameter groups but this optimizer has {len(self.param_groups)}"
            )
        for group, loaded in zip(self.param_groups, groups, strict=True):
            values = self._hyper_parameters(loaded)  # without torch's numbers of the parameters
            group.update({key: tuple(v) if key == "betas" else v for key, v in values.items()})

    def rule(self, group: int, step: int, grad_scale: float) -> Rule:
        """Return the rule for update number `step` of a parameter of `group`, with the current hyper-parameters.

        Raises:
            ConfigError: a hyper-parameter of the group is missing, is no number or is out of range.
        """
        try:
            return self.kind.rule(self.param_groups[group], step, grad_scale)
        except (KeyError, TypeError, ValueError) as error:
            values = self._hyper_parameters(self.param_groups[group])
            raise ConfigError(
                f"parameter group {group} has a hyper-parameter that is missing or cannot be used ({error!r}); it has "
                f"{values}: correct optimizer.param_groups[{group}]"
            ) from error

    def rules(self) -> list[Rule]:
        """Return the current rules of all groups, for comparison."""
        return [self.rule(group, 1, 1.0) for group in range(len(self.param_groups))]

    @staticmethod
    def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key != "params"}


def _refuse_loading(
    taker: weakref.ref[TieredOptimizer], given: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Refuse to load into `given` while an engine trains its parameters: the engine would ignore the loaded values."""
    tiered = taker()
    if tiered is not None and tiered.run_step is not None:
        check_no_states(state_dict)
        raise ConfigError(
            f"an engine has taken over this {type(given).__name__}: load into the optimizer that initialize returned"
        )
