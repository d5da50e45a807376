"""The optimizer under DeepSpeed's names: a class for each way to divide states, with what scripts read of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.dialect.values import safe_get_local_grad
from infinity.optim.kinds import ADAM, OptimizerKind
from infinity.optim.optimizer import ParamsOrGroups, TieredOptimizer
from infinity.zero.gathered import owner_of


class ZeROOptimizer(TieredOptimizer):
    """The optimizer of an engine whose states are divided among ranks. Engines make it, and nobody else."""

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the step's gradients so far, flat, in float32, times the loss scale, by group.

        They are in the order of the group's parameters, without those that have none; empty where no parameter has.
        To look at: `safe_set_local_grad` changes them, and torch refuses what would change these copies in place. To
        set it to an empty dictionary drops the gradients, as `zero_grad()`. All ranks read it together.

        Raises:
            InfinityError: they have been used already.
        """
        found = {}
        for index, group in enumerate(self.param_groups):
            grads = [grad for param in group["params"] if (grad := safe_get_local_grad(param)) is not None]
            with torch.inference_mode():  # whose tensors are for reading
                found[index] = [grad * self.loss_scaler.value for grad in grads]
        return found if any(found.values()) else {}

    @averaged_gradients.setter
    def averaged_gradients(self, value: dict[int, list[torch.Tensor]]) -> None:
        if value:
            raise ConfigError(
                "optimizer.averaged_gradients cannot be set to other gradients: use deepspeed.utils.safe_set_full_grad "
                "or safe_set_local_grad, parameter by parameter"
            )
        self.zero_grad()

    @property
    def clip_grad(self) -> float:
        """Global norm that gradients are clipped to; 0 for none."""
        engine = self._engine()
        return 0.0 if engine is None else engine.config.gradient_clipping

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        if value != self.clip_grad:
            raise ConfigError(
                f"optimizer.clip_grad is {self.clip_grad:g} and cannot become {value:g} while an engine trains: set "
                "the configuration's gradient_clipping"
            )

    @property
    def _global_grad_norm(self) -> Any:
        engine = self._engine()
        return None if engine is None else engine.get_global_grad_norm()

    def _engine(self) -> Engine | None:
        param = next((param for group in self.param_groups for param in group["params"]), None)
        found = None if param is None else owner_of(param)
        if found is None:
            return None
        assert isinstance(found[0], Engine)
        return found[0]


class _Nothing:
    """A module without parameters, as far as TRL looks at one."""

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class ParameterOffload:
    """What TRL takes hooks from while it generates: there are none here, for generating needs the engine's."""

    def __init__(self) -> None:
        self.module = _Nothing()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Nothing was taken away."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Of stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801  (DeepSpeed's name)
    """Of stage 3.

    Attributes:
        leaf_parameters: by module, of those that `set_z3_leaf_modules` has named.
    """

    def __init__(self, params: ParamsOrGroups, defaults: Mapping[str, Any], kind: OptimizerKind = ADAM) -> None:
        super().__init__(params, defaults, kind)
        self.leaf_parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self.parameter_offload = ParameterOffload()


def optimizer_class(stage: int) -> type[TieredOptimizer]:
    """The class of the optimizer at a ZeRO stage."""
    return (TieredOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)[stage]
