"""A strategy for Lightning's Trainer: `Trainer(strategy=InfinityStrategy("configs/nvme.json"))`.

[Note: who does what]
Lightning decides when a step ends, when to validate and to save, and steps the learning rate. The engine does forward,
backward, update, clipping and precision, and saves the model. So the Trainer's accumulation, clipping and precision are
copied into the configuration. A checkpoint is a directory of the engine, with Lightning's dictionary as client state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from infinity.config import with_values
from infinity.errors import CheckpointError, ConfigError
from infinity.integrations.deepspeed.engine import DeepSpeedEngine
from infinity.optim.torch_schedules import rebind
from infinity.setup import initialize
from infinity.zero.construction import Init

_TAG = "checkpoint"
_SECTIONS = {"bf16": "bf16", "16": "fp16"}  # section of the configuration, by the first word of a Trainer's precision


class InfinityStrategy(DDPStrategy):
    """Trains, evaluates and predicts with an engine, in as many processes as the Trainer or a launcher starts.

    Args:
        config: a DeepSpeed-style JSON file, or the same as a mapping. Batch sizes may be left out. Accumulation,
            clipping and precision come from the Trainer; a contradiction is refused. With an `optimizer` section,
            `configure_optimizers` is not called.
        more: arguments of Lightning's DDPStrategy, such as `process_group_backend` and `timeout`.
    """

    strategy_name = "infinity"

    def __init__(self, config: str | Path | Mapping[str, Any], **more: Any) -> None:
        super().__init__(**more)
        self._given = config
        self._from_file = False

    @property
    def engine(self) -> DeepSpeedEngine:
        """The engine. It exists from the Trainer's setup to its end."""
        if not isinstance(self.model, DeepSpeedEngine):
            raise ConfigError("InfinityStrategy has an engine only while its Trainer runs: use it in a hook")
        return self.model

    # Configuration #

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else _EnginePrecision("32-true")

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Set the Trainer's precision, as a plugin that leaves the conversion to the engine."""
        if plugin is not None and not isinstance(plugin, _EnginePrecision):
            plugin = _EnginePrecision(str(plugin.precision))
        self._precision_plugin = plugin

    def _configuration(self, trainer: Trainer) -> dict[str, Any]:
        """Return the given configuration with the Trainer's settings. Refuse contradictions between the two."""
        config = with_values(self._given, {})
        decided = {
            "gradient_accumulation_steps": (trainer.accumulate_grad_batches, "accumulate_grad_batches"),
            "gradient_clipping": (trainer.gradient_clip_val or 0.0, "gradient_clip_val"),
        }
        for key, (value, argument) in decided.items():
            if config.setdefault(key, value) not in (value, "auto"):
                raise ConfigError(f"{key} is {config[key]} and Trainer({argument}) is {value}: leave the key out")
            config[key] = value
        if str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() != "norm":
            raise ConfigError("Trainer(gradient_clip_algorithm='value') is not supported: clip by norm")
        section = _SECTIONS.get(self.precision_plugin.precision.partition("-")[0])
        if section is not None:
            other = "fp16" if section == "bf16" else "bf16"
            if (config.get(other) or {}).get("enabled") is True:
                raise ConfigError(f"Trainer(precision={self.precision_plugin.precision!r}) and {other} contradict")
            config[section] = {**(config.get(section) or {}), "enabled": True}
        for key in ("optimizer", "scheduler"):  # "auto" in files for transformers' Trainer, which sets the values
            if "auto" in ((config.get(key) or {}).get("params") or {}).values():
                del config[key]  # so that `configure_optimizers` is used
        if config.get("train_batch_size", "auto") == "auto":
            config.pop("train_batch_size", None)
            if config.get("train_micro_batch_size_per_gpu", "auto") == "auto":
                config["train_micro_batch_size_per_gpu"] = 1
        return config

    # From a Trainer to an engine #

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self._engine_for(trainer, self.lightning_module)
        self.barrier()

    def _engine_for(self, trainer: Trainer, module: LightningModule) -> DeepSpeedEngine:
        config = self._configuration(trainer)
        trains = trainer.state.fn == TrainerFn.FITTING
        if trains:
            _check_averages(trainer, config)
        optimizer = None
        self.optimizers, self.lr_scheduler_configs = [], []
        if trains and config.get("optimizer") is None:
            optimizers, self.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
            if len(optimizers) != 1:
                raise ConfigError(
                    f"configure_optimizers gave {len(optimizers)} optimizers, and one is trained with: give one with "
                    "parameter groups, or the configuration an optimizer section"
                )
            optimizer = optimizers[0]
        engine, tiered, _, scheduler = initialize(
            module,
            config,
            optimizer=optimizer,
            device=self.root_device,
            trains=trains,
            engine_class=DeepSpeedEngine,
        )
        assert isinstance(engine, DeepSpeedEngine)
        for each in self.lr_scheduler_configs:
            rebind(each.scheduler, optimizer, tiered)  # type: ignore[arg-type]
        if scheduler is not None and trains:
            self.lr_scheduler_configs = []  # the engine steps the scheduler of the configuration
        self.optimizers = [] if tiered is None else [tiered]
        return engine

    def teardown(self) -> None:
        """Close the engine, and leave the newest values in the module if they fit in memory."""
        if isinstance(self.model, DeepSpeedEngine):
            engine, self.model = self.model, self.lightning_module
            self.optimizers = []
            engine.destroy()
        super().teardown()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Keep the parameters that `configure_model` creates in files until the engine places them."""
        with Init():
            yield

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    # Steps #

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Set whether this micro-batch is the last of its step: an epoch may end in the middle of a step."""
        trainer = self._trainer
        if trainer.accumulate_grad_batches > 1:
            self.engine.set_gradient_accumulation_boundary(not trainer.fit_loop._should_accumulate())

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: `pre_backward` has set that the micro-batch is not the last."""
        yield

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        return self.precision_plugin.optimizer_step(optimizer, model or self.lightning_module, closure, **kwargs)

    # Checkpoints #

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # `load_checkpoint` has restored it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # the engine saves the weights

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint directory of the engine at `filepath`. All ranks call this together.

        Raises:
            ConfigError: `storage_options` are given, or a callback or hook has put weights into the checkpoint.
        """
        if storage_options is not None:
            raise ConfigError("storage_options are not supported: a checkpoint is a directory on a filesystem")
        if checkpoint.get("state_dict"):
            raise ConfigError(
                "a callback or on_save_checkpoint put weights into checkpoint['state_dict'], and the engine saves the "
                "weights that it trains: use another key"
            )
        rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        path = Path(self.broadcast(str(filepath)))
        self.engine.save_checkpoint(path, _TAG, client_state={"lightning": _plain(rest)})

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory that `save_checkpoint` wrote, or the weights of a file of another strategy.

        Raises:
            CheckpointError: the path is neither, or the checkpoint is damaged.
        """
        path = Path(self.broadcast(str(checkpoint_path)))
        self._from_file = path.is_file()
        if self._from_file:
            found: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return found
        trains = self._trainer.state.fn == TrainerFn.FITTING
        _, state = self.engine.load_checkpoint(
            path, _TAG, load_optimizer_states=trains, load_lr_scheduler_states=trains, load_module_only=not trains
        )
        if state is None or "lightning" not in state:
            raise CheckpointError(f"{path} was not saved by Lightning: load it with engine.load_checkpoint in a hook")
        return dict(state["lightning"])

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._from_file:
            assert self.lightning_module is not None
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)


def _check_averages(trainer: Trainer, config: Mapping[str, Any]) -> None:
    """Refuse a callback whose average of the weights would be NaN, or would not be in the checkpoints."""
    averages = getattr(callbacks, "WeightAveraging", ())  # Lightning 2.6
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if not isinstance(callback, (callbacks.StochasticWeightAveraging, averages)):
            continue
        if (config.get("zero_optimization") or {}).get("stage") == 3:
            raise ConfigError(f"{name} reads parameters between steps, where stage 3 has no values: choose stage 2")
        if isinstance(callback, averages) and trainer.checkpoint_callbacks:
            raise ConfigError(
                f"{name} saves its average in the place of the weights, and the engine saves the weights: pass "
                "enable_checkpointing=False (the module has the average after fit)"
            )


class _EnginePrecision(Precision):
    """Converts inputs only: the engine computes in its own dtype, keeps masters and scales the loss."""

    def __init__(self, precision: str) -> None:
        if precision.partition("-")[0] not in ("32", *_SECTIONS):
            raise ConfigError(f"Trainer(precision={precision!r}) is not supported: choose 32, 16 or bf16")
        self.precision = precision

    def convert_module(self, module: Any) -> Any:
        return module

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()  # no autocast, because the parameters have the compute dtype

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        model.trainer.strategy.engine.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise ConfigError("training_step returned None: a step cannot be left out, return a loss")
        model.trainer.strategy.engine.step()
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clips, as configured."""


def _plain(value: Any) -> Any:
    """Return a value of Lightning in types that a checkpoint can load without running code."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else list(map(_plain, value))
    if isinstance(value, Path):
        return str(value)
    return value
