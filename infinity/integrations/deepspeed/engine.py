"""`deepspeed.initialize`, and an engine with the methods that scripts and Hugging Face's libraries call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity import __version__
from infinity.checkpoint.extra import persistent_buffers, tied_names
from infinity.config import Config
from infinity.config.load import with_values
from infinity.errors import ConfigError, InfinityError
from infinity.integrations.deepspeed import front
from infinity.integrations.deepspeed.comm import check_accelerate, check_initialized, get_world_group
from infinity.integrations.deepspeed.deepspeeds_settings import check_setting
from infinity.integrations.deepspeed.logs import log_dist, logger
from infinity.integrations.deepspeed.misuse import AssertedConfigError, AssertedError
from infinity.integrations.deepspeed.one_save import expect_any_save, expect_save_of_rank_0
from infinity.integrations.deepspeed.optimizers import DeepSpeedZeroOptimizer_Stage3, NamedOptimizer, optimizer_class
from infinity.integrations.deepspeed.parameters import mark
from infinity.integrations.deepspeed.script_engine import Engine
from infinity.integrations.deepspeed.section_facts import SectionFacts
from infinity.integrations.deepspeed.timers import SynchronizedWallClockTimer, ThroughputTimer
from infinity.integrations.deepspeed.zero_to_fp32 import SCRIPT, SCRIPT_NAME
from infinity.optim.adamw import AdamW
from infinity.optim.kinds import KINDS
from infinity.optim.optimizer import TieredOptimizer
from infinity.optim.torch_schedules import advances_by_itself, is_factory
from infinity.zero.leaf_modules import get_z3_leaf_modules
from infinity.zero.param_access import owner_of

_UNSYNCHRONISED = SimpleNamespace(enabled=True, synchronized=False)  # a wait for the device would slow each step down


class DeepSpeedEngine(SectionFacts, Engine, nn.Module):
    """An engine that is an `nn.Module` around the model. Its parameters are the model's own.

    Attributes:
        timers: clocks for the script's own measurements; `stats()` has those of the engine.
        tput_timer: samples per second, in host time from forward to `step()`.
    """

    __call__ = nn.Module.__call__  # runs the hooks that libraries register

    def __init__(self, *args: Any) -> None:
        nn.Module.__init__(self)
        self.inside_no_sync = False
        self._training_dataloader: Any = None
        self._trains = True
        Engine.__init__(self, *args)
        self.timers = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(_UNSYNCHRONISED, self.config.train_batch_size)

    def __getattr__(self, name: str) -> Any:
        if name == "module" and "_modules" in vars(self):
            return vars(self)["_modules"]["module"]
        return Engine.__getattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_setting(type(self), "engine", name)
        super().__setattr__(name, value)

    @classmethod
    def optimizer_class(cls, config: Config) -> type[TieredOptimizer]:
        return optimizer_class(config)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict, with the newest values. All ranks call this together."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the model."""
        return self.module.load_state_dict(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the model's parameters. At stage 3 they have values only in `zero.GatheredParameters`."""
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of the model's parameters."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def scale(self, loss: torch.Tensor, scale_wrt_gas: bool = True, *, retain_graph: bool = False) -> torch.Tensor:
        """As in `infinity.Engine`. `retain_graph` has no effect: give it to the `backward()` of the result.

        Raises:
            AssertedConfigError: `loss` is not one number that has a gradient.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise AssertedConfigError(
                f"engine.scale takes a loss, which is a scalar tensor with a gradient, not one {found}: reduce it first"
            )
        return super().scale(loss, scale_wrt_gas)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in `infinity.Engine`.

        Raises:
            AssertedError: at stages 2 and 3 on several ranks, or within another one.
        """
        if self.inside_no_sync:
            raise AssertedError("no_sync context manager reentry is unsupported: leave the first one")
        with ExitStack() as stack:
            try:
                stack.enter_context(super().no_sync())
            except InfinityError as error:
                raise AssertedError(f"no_sync context manager is incompatible with this engine: {error}") from error
            self.inside_no_sync = True
            stack.callback(setattr, self, "inside_no_sync", False)
            yield

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """As in `infinity.Engine`.

        Raises:
            AssertedError: every `step()` ends a step, or no memory is reserved for gradients of several passes.
        """
        try:
            super().set_gradient_accumulation_boundary(is_boundary)
        except InfinityError as error:
            raise AssertedError(str(error)) from error

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As in `infinity.Engine`."""
        if self.training:
            expect_any_save(self.module)  # this step changes the values that rank 0 has collected
            self.tput_timer.start()
        return super().forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """As in `infinity.Engine`, but return the loss divided by the gradient accumulation steps, in its own dtype."""
        super().backward(loss, retain_graph, scale_wrt_gas)
        steps = self.gradient_accumulation_steps() if scale_wrt_gas else 1
        return loss if steps == 1 else loss / steps

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """As in `infinity.Engine`.

        Raises:
            AssertedError: inside `no_sync`.
            ConfigError: `lr_kwargs`, the arguments for the schedule's step, is given.
        """
        if lr_kwargs:
            raise ConfigError("engine.step(lr_kwargs=...) is not supported: step such a schedule in the training loop")
        if self.inside_no_sync:
            raise AssertedError(
                "It is illegal to call Engine.step() inside no_sync context manager: leave it before the last backward "
                "of the step"
            )
        at_boundary = self.is_gradient_accumulation_boundary()
        super().step()
        self.tput_timer.stop(global_step=at_boundary)

    def loss_scale(self) -> float:  # type: ignore[override]
        """Return the configured scale: 0 for a dynamic one, whose present value is `optimizer.cur_scale`."""
        fp16 = self.config.fp16
        return 0.0 if fp16 is None else fp16.loss_scale

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer | None:
        """`optimizer.optimizer`; None if nothing is trained."""
        return self.optimizer.optimizer if self._trains and isinstance(self.optimizer, NamedOptimizer) else None

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """An empty set: sparse gradients are made dense."""
        return set()

    @property
    def training_dataloader(self) -> Any:
        """The data loader that `initialize` has made for `training_data`."""
        return self._training_dataloader

    @property
    def data_parallel_group(self) -> Any:
        """The process group of all ranks; None if there is none."""
        return get_world_group() if dist.is_initialized() else None

    seq_data_parallel_group = data_parallel_group

    @property
    def mp_world_size(self) -> int:
        """The number of parts that the model is divided into."""
        return self._runtime.parts.ranks.size

    @property
    def has_moe_layers(self) -> bool:
        """False: a block with experts is a unit like others."""
        return False

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: backward passes have reduced the gradients."""

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **more: Any) -> None:
        """Load the model's values from `checkpoint["module"]`, by name. All ranks call this together.

        Raises:
            ConfigError: another argument is given.
        """
        unsupported = [name for name, value in more.items() if value and name != "fetch_z3_params"]
        if unsupported:
            raise ConfigError(
                f"load_module_state_dict({unsupported[0]}=...) is not supported: change parameters in "
                "zero.GatheredParameters"
            )
        self.module.load_state_dict(checkpoint["module"], strict)

    def _get_optimizer_ckpt_name(self, *args: Any) -> str:
        raise InfinityError("optimizer states have no file of their own here: see docs/checkpoints.md")

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in `infinity.Engine`, but return True.

        Raises:
            AssertedConfigError: `save_dir` is empty, or the tag is not the same on all ranks.
        """
        try:
            super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        except ConfigError as error:
            raise AssertedConfigError(str(error)) from error
        self._session.unclaim()  # scripts never close an engine, and continue in the directory with another one
        if self.global_rank == 0:
            (Path(save_dir) / SCRIPT_NAME).write_text(SCRIPT, encoding="utf-8")
        return True

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As in `infinity.Engine`.

        Raises:
            ConfigError: `custom_load_fn` is given.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn is not supported: change parameters in zero.GatheredParameters")
        path, client_state = super().load_checkpoint(
            load_dir,
            tag,
            load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        return None if path is None else str(path), client_state

    def close(self) -> None:
        """As in `infinity.Engine`."""
        expect_any_save(self.module)
        super().close()

    def save_16bit_model(  # type: ignore[override]
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As in `infinity.Engine`, but write one file, and return True."""
        self._session.export(
            save_dir,
            super().named_parameters(),
            "5GB",
            file_name=save_filename,
            frozen=not exclude_frozen_parameters,
        )
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(
        self,
        destination: dict[str, torch.Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Return copies of the newest values by name, on all ranks. All ranks call this together."""
        every = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, param in every if not param.requires_grad}
        state = self.module.state_dict()
        taken = {} if destination is None else destination
        for name, value in state.items():
            if not (exclude_frozen_parameters and name in frozen):
                taken[prefix + name] = value
        return taken

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the newest values by name on rank 0, in host memory; None on other ranks. All ranks call this."""
        keeps = self.global_rank == 0
        found = {name: value for name, value in super().named_parameters() if keeps}
        if not keeps:
            expect_save_of_rank_0(self.module)
            return None
        state = {
            name: param.detach().clone() if name not in found else found[name]
            for name, param in self.module.named_parameters()
            if param.requires_grad or not exclude_frozen_parameters
        }
        state |= {name: buffer.detach().cpu().clone() for name, buffer in persistent_buffers(self.module).items()}
        return state | {name: state[first] for name, first in tied_names(self.module).items() if first in state}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _without_optimizer(config: Any) -> Any:
    """Return the configuration without its optimizer section, because the script gives an optimizer."""
    if config is None or isinstance(config, Config):
        return config
    values = with_values(config, {})
    if values.get("optimizer") is not None:
        logger.warning("the optimizer section of the configuration is not used: the script gives an optimizer")
        values["optimizer"] = None
    return values


def _take_back(model: nn.Module | None) -> None:
    """End the model's present engine, if it has one: a script that calls `initialize` again has given it up.

    Raises:
        InfinityError: the engine trains, and the values do not fit in memory or a step is running.
    """
    param = None if model is None else next(model.parameters(), None)
    found = None if param is None else owner_of(param)
    if found is None:
        return
    engine = found[0]
    if isinstance(engine, DeepSpeedEngine) and engine.module is model:
        lost = "with its optimizer states" if engine._trains else "which has no optimizer"
        engine.destroy(strict=engine._trains)
        logger.warning(f"the model's engine, {lost}, is ended: the model has another one from now on")


_TAKEN_OVER: tuple[type, ...] = (AdamW, *(cls for kind in KINDS for cls in kind.torch_classes))


def get_state_devices(engine: Engine, state: Any) -> set[torch.device]:
    """Return the devices with states of a kind: host memory, if the model computes on the CPU.

    Raises:
        InfinityError: the model computes on a device, which may have only some of these states.
    """
    if engine.device.type != "cpu":
        raise InfinityError("get_state_devices: states are in several tiers at a time; see engine.stats()")
    return {engine.device}


def _as_in_deepspeed(config: Config) -> Config:
    """Return the configuration with DeepSpeed's initial masters. If optimizer states are not offloaded, gradients are
    kept until `step()`, because scripts read and change them before."""
    return replace(config, rounds_masters=True, keeps_gradients=config.zero.offload_optimizer.device == "none")


def _steppable(make: Any) -> Any:
    """Return the schedule's factory. That of Trainer then refuses schedules that only the training loop can step.

    accelerate leaves stepping to the engine: it wraps the returned schedule in an object whose `step` does nothing.
    """
    if not is_factory(make) or not str(getattr(make, "__module__", "")).startswith("transformers."):
        return make

    def checked(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = make(optimizer)
        if not advances_by_itself(scheduler):
            raise ConfigError(
                f"the schedule {type(scheduler).__name__} follows a metric, but Trainer does not step it if the "
                "configuration has an optimizer section: remove the section, so that Trainer makes the optimizer (its "
                "`optim`) and steps the schedule"
            )
        return scheduler

    return checked


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, TieredOptimizer | None, Any | None, Any | None]:
    """Call `infinity.initialize`. As in DeepSpeed, initialise `torch.distributed` unless `dist_init_required` is False.

    Raises:
        AssertedConfigError: there is no model, the optimizer is not supported, or a scheduler is given without its
            optimizer.
        ConfigError: Trainer's schedule follows a metric, and the configuration has the optimizer.
    """
    if model is None and not isinstance(args, nn.Module):
        raise AssertedConfigError("deepspeed.initialize requires a model")
    if config is None and config_params is None and getattr(args, "deepspeed_config", None) is None:
        config = getattr(args, "deepscale_config", None)  # its oldest name
    if isinstance(lr_scheduler, LRScheduler) and not isinstance(optimizer, torch.optim.Optimizer):
        raise AssertedConfigError(
            "lr_scheduler is a scheduler of an optimizer that is not given: pass that as `optimizer` too, or a "
            "callable that makes the scheduler from an optimizer"
        )
    if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, _TAKEN_OVER):
        raise AssertedConfigError(
            f"optimizer {type(optimizer).__name__} cannot be tiered; pass torch.optim's Adam, AdamW, Adagrad or SGD, "
            "or name one in the configuration"
        )
    check_initialized(dist_init_required)
    check_accelerate()
    _take_back(model)
    engine, tiered, dataloader, scheduler = front.initialize(
        args,
        model,
        optimizer,
        model_parameters,
        training_data,
        _steppable(lr_scheduler),
        distributed_port,
        mpu,
        True if dist_init_required is None else dist_init_required,
        collate_fn,
        config if optimizer is None else _without_optimizer(config),
        mesh_param,
        config_params if optimizer is None else _without_optimizer(config_params),
        trains=None,
        engine_class=DeepSpeedEngine,
        adapt=_as_in_deepspeed,
    )
    assert isinstance(engine, DeepSpeedEngine)
    log_dist(f"DeepSpeed info: in its place is infinity {__version__}")  # tools look for this beginning of the logs
    engine._training_dataloader = dataloader
    engine._trains = tiered is not None
    if engine.zero_optimization_partition_weights():
        mark(engine)
        assert isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
        leaves = get_z3_leaf_modules(engine.module)
        engine.optimizer.leaf_parameters = {leaf: list(leaf.parameters()) for leaf in leaves}
    return engine, tiered, dataloader, scheduler
