"""The resolved configuration: plain frozen facts, no "auto" left that the file alone can decide."""

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
    """Which tier is home for a kind of state.

    Attributes:
        ratio: the share of it that is there; the rest stays on the compute device. None for all but what is updated
            sooner there, if the device has room to spare.
    """

    device: Device
    nvme_path: Path | None
    ratio: float | None = None


@dataclass(frozen=True)
class LeafModules:
    """Modules that are gathered whole: by classes, by their names in the model, and by ends of such names."""

    classes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ZeroConfig:
    """Stage and placement.

    Attributes:
        param_persistence_threshold: parameters of at most this many elements outside of blocks stay resident.
        prefetch_numel: elements of units that ranks gather ahead of their use, beyond the next one; None for a default.
        shard_size: neighbouring ranks that divide the states among them, as the others do; None for all ranks.
        leaf_modules: what is gathered whole, beside what `set_z3_leaf_modules` has named.
    """

    stage: int
    offload_param: OffloadConfig
    offload_optimizer: OffloadConfig
    param_persistence_threshold: int
    prefetch_numel: int | None = None
    shard_size: int | None = None
    leaf_modules: LeafModules = LeafModules()

    def sharing(self, ranks: int) -> int:
        """Of so many ranks, those that divide the states among them.

        Raises:
            ConfigError: the ranks are no whole number of such groups.
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
    """A directory on a drive; capacity None means what is free."""

    path: Path
    capacity_bytes: int | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class TieringConfig:
    """Budgets and policies of the tiers; None means chosen at initialize (for `timeline`: none is written).

    Attributes:
        fill_device: optimizer states come to the device as far as its memory has room; "auto" does nothing where they
            cannot.
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
    """How ranks talk to each other.

    Attributes:
        timeout_s: how long one waits for another.
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
    """What is told about training, and to whom; None where nothing is.

    Attributes:
        tensorboard, csv: directory of the files.
        phases: the seconds of forward, backward and step, too.
    """

    tensorboard: Path | None = None
    csv: Path | None = None
    wandb: WandbConfig | None = None
    phases: bool = False

    @property
    def enabled(self) -> bool:
        """Somebody is told something."""
        return any(section is not None for section in (self.tensorboard, self.csv, self.wandb))


@dataclass(frozen=True)
class Config:
    """Everything that `initialize` needs to know.

    Attributes:
        train_batch_size: samples per update over all ranks.
        micro_batch_size: samples per forward on one rank.
        gradient_clipping: global norm to clip to; 0 for none.
        communication_data_type: in which gradients travel between ranks and are summed there; by default `precision`.
        grad_accum_dtype: in which the gradients of micro-batches are summed.
        managed_accumulation: steps are counted by micro-batches; else each call of `step()` ends one.
        drops_last: the loader that `initialize` makes of a dataset leaves out a last micro-batch that is not full.
        sums_ranks: gradients are the sum over the ranks, not the mean.
        autocast: in which the model's forward runs under `torch.autocast`; None where it does not.
        keeps_gradients: those of a step wait for `step()`, whatever else needs them.
        rounds_masters: the master weights begin as what the compute dtype has of the model's values.
        casts_inputs: inputs of the model's forward that are floating-point numbers become fp16, as its parameters are.
        fp16: how the loss is scaled; None unless `precision` or `autocast` is fp16.
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
        """Nothing may be updated before `step()`: only then is the norm known, or that the step ends."""
        return (
            self.keeps_gradients or self.gradient_clipping > 0 or self.fp16 is not None or not self.managed_accumulation
        )

    @property
    def accumulates(self) -> bool:
        """The gradients of a step may come in several backward passes."""
        return self.gradient_accumulation_steps > 1 or not self.managed_accumulation

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def get(self, key: str, default: Any = None) -> Any:
        """What the file has at a key of its outermost level."""
        return self.source.get(key, default)
