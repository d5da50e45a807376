"""The optimizer under DeepSpeed's names: a class for each way to divide states, with attributes that scripts read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.integrations.deepspeed.base_optimizers import LiveStates, base_optimizer
from infinity.integrations.deepspeed.deepspeeds_settings import check_setting
from infinity.integrations.deepspeed.live_views import LiveView, flat_gradients, flat_masters, flat_values, moments
from infinity.integrations.deepspeed.misuse import AssertedConfigError
from infinity.integrations.deepspeed.values import safe_get_full_grad, safe_get_local_grad
from infinity.optim.kinds import ADAM, OptimizerKind
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import ParamsOrGroups, TieredOptimizer
from infinity.zero.param_access import owner_of

DeepSpeedOptimizerCallable = Callable[[Any], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]


class NamedOptimizer(TieredOptimizer):
    """The optimizer of an engine with the attributes of DeepSpeed's at every stage. Only engines create it.

    Attributes:
        state: by parameter, or by a flat tensor of this optimizer, such as one of `single_partition_of_fp32_groups`:
            the number of updates as "step", and the moments by name, read-only, see [Note: live views].
    """

    _base: torch.optim.Optimizer | None = None

    def __init__(self, params: ParamsOrGroups, defaults: Mapping[str, Any], kind: OptimizerKind = ADAM) -> None:
        super().__init__(params, defaults, kind)
        reference = weakref.ref(self)
        self.state = LiveStates(lambda: _steps_of(reference()), moments)

    def __setattr__(self, name: str, value: Any) -> None:
        check_setting(type(self), "optimizer", name)
        super().__setattr__(name, value)

    def share_groups(self, given: torch.optim.Optimizer) -> None:
        """As for every optimizer; the given one becomes `optimizer`."""
        super().share_groups(given)
        self._base = given

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was given to `initialize`, or one of DeepSpeed's class for the configuration.

        It shares the parameter groups, so that its learning rates take effect. If it is made here, it also shares the
        states.
        """
        engine = self._engine()
        if self._base is None and engine is not None:
            self._base = base_optimizer(engine.config, self.param_groups)
            if self._base is not None:
                self._base.state = self.state
        return self if self._base is None else self._base

    @property
    def loss_scale_config(self) -> LossScale:
        """The loss scale, with `cur_scale`, `cur_iter`, `scale_window` and its other values."""
        return self.loss_scaler

    @property
    def cur_iter(self) -> int:
        """As the loss scale's."""
        return self.loss_scaler.cur_iter

    @property
    def scale_window(self) -> int:
        """As the loss scale's."""
        return self.loss_scaler.scale_window

    @property
    def min_loss_scale(self) -> float:
        """As the loss scale's."""
        return self.loss_scaler.min_loss_scale

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

    @property
    def bit16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.param_groups]

    fp16_groups = bit16_groups

    @property
    def micro_step_id(self) -> int:
        """The number of micro-batches of the step so far, counted by calls of `engine.step()`."""
        engine = self._engine()
        if engine is None or not engine.config.managed_accumulation:
            return 0
        return engine.micro_steps % engine.config.gradient_accumulation_steps

    @property
    def _epilogue_ran_this_backward(self) -> bool:
        """Whether a backward pass has ended, and the training loop has not called the engine since."""
        engine = self._engine()
        return engine is not None and engine.awaits_step

    def _engine(self) -> Engine | None:
        param = next((param for group in self.param_groups for param in group["params"]), None)
        found = None if param is None else owner_of(param)
        if found is None:
            return None
        assert isinstance(found[0], Engine)
        return found[0]

    def _masters(self, name: str) -> list[LiveView]:
        """Return this rank's part of each group's masters, flat."""
        return [flat_masters(f"optimizer.{name}", params) for params in self.bit16_groups]


def _steps_of(optimizer: NamedOptimizer | None) -> int:
    """Return the number of updates so far, without skipped ones."""
    engine = None if optimizer is None else optimizer._engine()
    return 0 if engine is None else engine.global_steps - engine.skipped_steps


class _SixteenBits(NamedOptimizer):
    @property
    def low_precision_dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self.param_groups[0]["params"][0].dtype  # type: ignore[no-any-return]


class FP16_Optimizer(_SixteenBits):  # noqa: N801  (DeepSpeed's name)
    """The optimizer of stage 0 in 16 bits, for DeepSpeed's own Adam."""

    @property
    def fp32_groups_flat(self) -> list[LiveView]:
        """The float32 masters of each group, flat, read-only; see [Note: live views]."""
        return self._masters("fp32_groups_flat")


class FP16_UnfusedOptimizer(_SixteenBits):  # noqa: N801  (DeepSpeed's name)
    """The optimizer of stage 0 in 16 bits, for all others."""

    @property
    def fp32_groups(self) -> list[list[LiveView]]:
        """The float32 master of each parameter, flat, by group, read-only; see [Note: live views]."""
        return [[flat_masters("optimizer.fp32_groups", [param]) for param in params] for params in self.bit16_groups]


class ZeROOptimizer(NamedOptimizer):
    """The optimizer of an engine whose states are divided among ranks."""

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """This rank's parts of the step's gradients so far, flat, in float32, times the loss scale, by group.

        They are in the order of the group's parameters, without parameters that have no gradient; empty if there are no
        gradients at all. The copies are read-only (`safe_set_local_grad` changes gradients); torch refuses in-place
        changes. Setting an empty dictionary drops the gradients, as `zero_grad()` does. All ranks read it together.

        Raises:
            InfinityError: the gradients have been used for an update.
        """
        found = {}
        for index, group in enumerate(self.param_groups):
            grads = [grad for param in group["params"] if (grad := safe_get_local_grad(param)) is not None]
            with torch.inference_mode():  # torch refuses in-place changes of its tensors outside of it
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


class BF16_Optimizer(ZeROOptimizer):  # noqa: N801  (DeepSpeed's name)
    """The optimizer of stage 1 in bf16 with gradients that are summed in float32, and states on the device."""

    @property
    def fp32_groups_flat_partition(self) -> list[LiveView]:
        """This rank's part of the float32 masters of each group, flat, read-only; see [Note: live views]."""
        return self._masters("fp32_groups_flat_partition")


class _Nothing:
    """A module without parameters, with the methods that TRL calls."""

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(())


class ParameterOffload:
    """The object from which TRL removes hooks for generation. It has none, because generation needs the engine's."""

    def __init__(self) -> None:
        self.module = _Nothing()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing: no hooks were removed."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The optimizer of stages 1 and 2."""

    @property
    def single_partition_of_fp32_groups(self) -> list[LiveView]:
        """This rank's part of the float32 masters of each group, flat, read-only; see [Note: live views]."""
        return self._masters("single_partition_of_fp32_groups")

    @property
    def bit16_groups_flat(self) -> list[LiveView]:
        """The parameters of each group, flat, in the compute dtype, read-only; see [Note: live views]."""
        return [flat_values("optimizer.bit16_groups_flat", params) for params in self.bit16_groups]


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801  (DeepSpeed's name)
    """The optimizer of stage 3.

    Attributes:
        leaf_parameters: the parameters of each module that `set_z3_leaf_modules` has named.
    """

    def __init__(self, params: ParamsOrGroups, defaults: Mapping[str, Any], kind: OptimizerKind = ADAM) -> None:
        super().__init__(params, defaults, kind)
        self.leaf_parameters: dict[nn.Module, list[nn.Parameter]] = {}
        self.parameter_offload = ParameterOffload()

    @property
    def fp32_partitioned_groups_flat(self) -> list[LiveView]:
        """This rank's part of the float32 masters of each group, flat, read-only; see [Note: live views]."""
        return self._masters("fp32_partitioned_groups_flat")

    @property
    def grad_partitions_flat_buffer(self) -> LiveView:
        """This rank's part of the step's gradients so far, flat, read-only; 0 for parameters without a gradient."""
        params = [param for group in self.bit16_groups for param in group]
        return flat_gradients("optimizer.grad_partitions_flat_buffer", params)

    def _get_norm_groups(self) -> list[torch.Tensor]:
        """Return the norm of each group's gradients, times the loss scale. All ranks call this together."""
        norms = []
        for params in self.bit16_groups:
            grads = [grad.norm() for param in params if (grad := safe_get_full_grad(param)) is not None]
            norms.append(torch.stack(grads or [torch.zeros(())]).norm() * self.loss_scaler.value)
        return norms


def _check_bucket(config: Config) -> None:
    size = int((config.get("zero_optimization") or {}).get("allgather_bucket_size") or 0)
    if config.zero.stage in (1, 2) and size % 2:
        raise AssertedConfigError(
            f"zero_optimization.allgather_bucket_size is {size}: DeepSpeed refuses it, because "
            "allgather_bucket_size must be a multiple of nccl_start_alignment_factor, 2. It changes nothing here: "
            "remove the key, or make it even"
        )


def optimizer_class(config: Config) -> type[TieredOptimizer]:
    """Return the class of DeepSpeed's optimizer for a configuration."""
    stage = config.zero.stage
    _check_bucket(config)
    if stage >= 2:
        return DeepSpeedZeroOptimizer if stage == 2 else DeepSpeedZeroOptimizer_Stage3
    if stage == 1:
        sums_in_float32 = (config.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")
        on_device = config.zero.offload_optimizer.device == "none"
        bf16 = config.precision == "bf16" and sums_in_float32 and on_device
        return BF16_Optimizer if bf16 else DeepSpeedZeroOptimizer
    if config.precision == "fp32":
        return NamedOptimizer
    own = config.optimizer is not None and config.optimizer.type.lower() in ("adam", "adamw")
    fused = own and config.optimizer is not None and not config.optimizer.params.get("torch_adam", False)
    return FP16_Optimizer if fused else FP16_UnfusedOptimizer
