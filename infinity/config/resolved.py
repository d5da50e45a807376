"""The resolved configuration, in frozen dataclasses. An "auto" that the file alone can decide is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from infinity.errors import ConfigError

Device = Literal["none", "cpu", "nvme"]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name, and its hyper-parameters."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Fp16Config:
    """The loss scale: static, or dynamic if `loss_scale` is 0; see infinity/optim/loss_scale.py."""

    loss_scale: float
    initial_scale_power: int
    loss_scale_window: int
    hysteresis: int
    min_loss_scale: float
    consecutive_hysteresis: bool


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate schedule by name, and its parameters."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class OffloadConfig:
    """The tier that is the home of a kind of state.

    Attributes:
        ratio: the share of the states in this tier; the rest stays on the compute device. None for all states, except
            those that spare device memory is filled with.
    """

    device: Device
    nvme_path: Path | None
    ratio: float | None = None


@dataclass(frozen=True)
class LeafModules:
    """Modules that are gathered as a whole: by class, by name in the model, and by suffix of such a name."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZeroConfig:
    """Stage and placement.

    Attributes:
        param_persistence_threshold: parameters of at most this many elements outside of blocks stay resident.
        prefetch_numel: elements of units that ranks gather ahead of their use, beyond the next one; None for a default.
        shard_size: number of neighbouring ranks that divide the states among them; None for all ranks.
        leaf_modules: modules that are gathered as a whole, besides those of `set_z3_leaf_modules`.
    """

    stage: int
    offload_param: OffloadConfig
    offload_optimizer: OffloadConfig
    param_persistence_threshold: int
    prefetch_numel: int | None = None
    shard_size: int | None = None
    leaf_modules: LeafModules = LeafModules()

    def sharing(self, ranks: int) -> int:
        """Return how many of `ranks` ranks divide the states among them.

        Raises:
            ConfigError: the number of ranks is no multiple of this.
        """
        if self.stage == 0:
            return 1
        size = ranks if self.shard_size is None else self.shard_size
        if ranks % size:
            raise ConfigError(
                f"communication.shard_size (or mics_shard_size, zero_hpz_partition_size) is {size}, but the number of "
                f"ranks, {ranks}, is no multiple of it: choose a divisor of {ranks}, or remove the key, so that all "
                "ranks divide the states"
            )
        return size


@dataclass(frozen=True)
class NvmeConfig:
    """A directory on a drive. Capacity None stands for the free space."""

    path: Path
    capacity_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class TieringConfig:
    """Budgets and policies of the tiers. None means chosen at `initialize` (for `timeline`: none is written).

    Attributes:
        fill_device: fill spare device memory with optimizer states; "auto" does nothing if that is not possible.
        device_headroom: the share of the device's memory that `fill_device` leaves free.
    """

    device_memory_bytes: int | None
    host_memory_bytes: int | None
    nvme: tuple[NvmeConfig, ...]
    state_format: str
    update_schedule: str
    accumulation: Literal["micro_batch", "layer"]
    io_backend: str
    checksum: bool
    crash_consistent: bool
    tile_size_bytes: int
    max_unit_size_bytes: int | None
    activations: Literal["none", "cpu", "nvme"]
    activation_memory_bytes: int
    timeline: Path | None
    timeline_steps: int
    status: bool = True
    fill_device: bool | Literal["auto"] = "auto"
    device_headroom: float = 0.05


@dataclass(frozen=True)
class AioConfig:
    """How the I/O engine cuts and queues requests."""

    block_size_bytes: int
    queue_depth: int
    threads: int
    sqpoll: bool
    iopoll: bool
    use_gds: bool


@dataclass(frozen=True)
class CommunicationConfig:
    """Communication between ranks.

    Attributes:
        timeout_s: the longest time that a rank waits for another.
    """

    timeout_s: float = 300.0


@dataclass(frozen=True)
class WandbConfig:
    """A run of Weights & Biases."""

    project: str
    group: str | None
    team: str | None


@dataclass(frozen=True)
class MonitorConfig:
    """The monitors that training reports to; None for one that is off.

    Attributes:
        tensorboard, csv: directory of the files.
        phases: also report the seconds of forward, backward and step.
    """

    tensorboard: Path | None = None
    csv: Path | None = None
    wandb: WandbConfig | None = None
    phases: bool = False

    @property
    def enabled(self) -> bool:
        """Whether a monitor is on."""
        return any(section is not None for section in (self.tensorboard, self.csv, self.wandb))


@dataclass(frozen=True)
class Config:
    """The configuration of an engine.

    Attributes:
        train_batch_size: samples per update over all ranks.
        micro_batch_size: samples per forward on one rank.
        gradient_clipping: global norm to clip to; 0 for no clipping.
        communication_data_type: the dtype in which ranks exchange and sum gradients; by default `precision`.
        grad_accum_dtype: the dtype in which the gradients of micro-batches are summed.
        managed_accumulation: a step ends after the configured number of micro-batches. If False, at each `step()`.
        drops_last: the data loader that `initialize` makes drops a last micro-batch that is not full.
        sums_ranks: gradients are the sum over the ranks, not the mean.
        autocast: the dtype of the model's forward under `torch.autocast`; None without autocast.
        keeps_gradients: the gradients of a step are kept until `step()`: no update runs before.
        rounds_masters: initialize the masters from the model's values rounded to the compute dtype.
        casts_inputs: convert floating-point inputs of the model's forward to fp16.
        fp16: the settings of the loss scale; None unless `precision` or `autocast` is fp16.
        source: the file's content as it was given; `config[key]` and `config.get(key)` read it.
    """

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_clipping: float
    precision: Precision
    communication_data_type: Precision
    grad_accum_dtype: Precision
    fp16: Fp16Config | None
    optimizer: OptimizerConfig | None
    scheduler: SchedulerConfig | None
    zero: ZeroConfig
    tiering: TieringConfig
    aio: AioConfig
    communication: CommunicationConfig = CommunicationConfig()
    monitors: MonitorConfig = MonitorConfig()
    managed_accumulation: bool = True
    sums_ranks: bool = False
    drops_last: bool = False
    autocast: Precision | None = None
    casts_inputs: bool = False
    keeps_gradients: bool = False
    rounds_masters: bool = False
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def waits(self) -> bool:
        """Whether updates must wait for `step()`, because the norm, or the end of the step, is not known before."""
        return (
            self.keeps_gradients or self.gradient_clipping > 0 or self.fp16 is not None or not self.managed_accumulation
        )

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several backward passes."""
        return self.gradient_accumulation_steps > 1 or not self.managed_accumulation

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return the file's value of a top-level key."""
        return self.source.get(key, default)
