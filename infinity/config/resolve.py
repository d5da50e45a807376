"""From the sections of the file to the frozen `Config`: what follows from what, and what contradicts what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infinity.config.resolved import (
    AioConfig,
    CommunicationConfig,
    Config,
    Fp16Config,
    MonitorConfig,
    NvmeConfig,
    OffloadConfig,
    OptimizerConfig,
    Precision,
    SchedulerConfig,
    TieringConfig,
    WandbConfig,
    ZeroConfig,
)
from infinity.config.schema import (
    ActivationSection,
    DataTypesSection,
    Fp16Section,
    OffloadSection,
    RootSection,
    SchedulerSection,
    TensorBoardSection,
    TieringSection,
    ZeroSection,
)
from infinity.config.values import boolean
from infinity.errors import ConfigError

_log = logging.getLogger(__name__)
# A tile of optimizer states: large enough for many cores in host memory, small enough that many are in flight on NVMe.
_HOST_TILE_BYTES = 16 << 20
_DRIVE_TILE_BYTES = 4 << 20


def resolve(root: RootSection, world_size: int) -> Config:
    micro, accumulation, total = _batch_sizes(root, world_size)
    optimizer = OptimizerConfig(**_without_auto("optimizer", root.optimizer)) if root.optimizer else None
    precision = _precision(root)
    zero = root.zero_optimization
    _check_placement(zero)
    if not root.managed_gradient_accumulation:
        _check_unmanaged(root.tiering)
    return Config(
        train_batch_size=total,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=root.gradient_clipping,
        precision=precision,
        communication_data_type=root.communication_data_type or precision,
        grad_accum_dtype=_grad_accum_dtype(
            root.data_types, precision, accumulates=accumulation > 1 or not root.managed_gradient_accumulation
        ),
        fp16=_fp16(root.fp16) if precision == "fp16" else None,
        optimizer=optimizer,
        scheduler=_scheduler(root.scheduler, optimizer) if root.scheduler else None,
        zero=ZeroConfig(
            stage=zero.stage,
            offload_param=_offload(zero.offload_param),
            offload_optimizer=_offload(zero.offload_optimizer),
            param_persistence_threshold=zero.param_persistence_threshold,
        ),
        tiering=_tiering(root.tiering, root.activation_checkpointing, zero.offload_param, zero.offload_optimizer),
        aio=AioConfig(
            root.aio.block_size,
            root.aio.queue_depth,
            root.aio.intra_op_parallelism,
            root.aio.sqpoll,
            root.aio.iopoll,
            root.aio.use_gds,
        ),
        communication=CommunicationConfig(root.communication.timeout),
        monitors=_monitors(root),
        managed_accumulation=root.managed_gradient_accumulation,
        drops_last=root.dataloader_drop_last,
        sums_ranks=root.gradient_allreduce_op == "sum",
        autocast=_autocast(root, precision),
    )


def _precision(root: RootSection) -> Precision:
    if root.fp16.enabled and root.bf16.enabled:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; enable one")
    return "fp16" if root.fp16.enabled else "bf16" if root.bf16.enabled else "fp32"


def _grad_accum_dtype(section: DataTypesSection, precision: Precision, *, accumulates: bool) -> Precision:
    if accumulates and section.grad_accum_dtype not in ("fp32", precision):
        raise ConfigError(
            f"data_types.grad_accum_dtype is {section.grad_accum_dtype} but the model trains in {precision}: gradients "
            f"are accumulated in fp32 or in {precision}; set it to one of them, or remove the key"
        )
    return section.grad_accum_dtype


def _check_placement(zero: ZeroSection) -> None:
    """What a stage keeps whole on every rank cannot have its home in a lower tier."""
    if zero.stage < 3 and zero.offload_param.device != "none":
        raise ConfigError(
            f"zero_optimization.stage is {zero.stage} but offload_param.device is {zero.offload_param.device}: "
            "parameters are offloaded by stage 3 only; set stage to 3, or offload_param.device to none"
        )
    if zero.stage < 1 and zero.offload_optimizer.device != "none":
        raise ConfigError(
            f"zero_optimization.stage is 0 but offload_optimizer.device is {zero.offload_optimizer.device}: "
            "optimizer states are offloaded by stages 1 to 3; set stage to 1 or more, or the device to none"
        )


def _batch_sizes(root: RootSection, world_size: int) -> tuple[int, int, int]:
    """(micro batch, accumulation steps, global batch), any two of which fix the third."""
    micro, accumulation = root.train_micro_batch_size_per_gpu, root.gradient_accumulation_steps
    total = root.train_batch_size
    if total is not None and (micro is None or accumulation is None):
        known = (micro or accumulation or 1) * world_size
        if total % known:
            raise ConfigError(_triangle(micro, accumulation, total, world_size))
        if micro is None:
            accumulation = accumulation or 1
            micro = total // (accumulation * world_size)
        else:
            accumulation = total // known
    micro, accumulation = micro or 1, accumulation or 1
    if total is not None and micro * accumulation * world_size != total:
        raise ConfigError(_triangle(micro, accumulation, total, world_size))
    return micro, accumulation, micro * accumulation * world_size


def _triangle(micro: int | None, accumulation: int | None, total: int, world_size: int) -> str:
    return (
        f"train_batch_size is {total}, but train_micro_batch_size_per_gpu ({micro}) x gradient_accumulation_steps "
        f"({accumulation}) x world size ({world_size}) must equal it; change or leave out one of the three"
    )


def _scheduler(section: SchedulerSection, optimizer: OptimizerConfig | None) -> SchedulerConfig:
    """A schedule whose highest rate is "auto" rises to the optimizer's."""
    resolved = SchedulerConfig(**_without_auto("scheduler", section))
    if section.params.get("warmup_max_lr") != "auto" or optimizer is None or "lr" not in optimizer.params:
        return resolved
    lr = optimizer.params["lr"]
    _log.info("configuration key scheduler.params.warmup_max_lr is auto: %s, the optimizer's", lr)
    return SchedulerConfig(resolved.type, {**resolved.params, "warmup_max_lr": lr})


def _without_auto(name: str, section: BaseModel) -> dict[str, Any]:
    """An optimizer or scheduler section, with "auto" parameters left to their defaults, and "true" for true."""
    values = section.model_dump()
    for key, value in values["params"].items():
        if value == "auto":
            _log.info("configuration key %s.params.%s is auto: left to its default", name, key)
    params = {key: boolean(value) for key, value in values["params"].items() if value != "auto"}
    return {"type": values["type"], "params": params}


def _autocast(root: RootSection, precision: Precision) -> bool:
    """Whether the forward pass runs under `torch.autocast`.

    Raises:
        ConfigError: in another dtype than bfloat16, with parameters that are not float32, or layer-major.
    """
    section = root.torch_autocast
    if not section.enabled:
        return False
    if section.dtype.removeprefix("torch.") not in ("bfloat16", "bf16"):
        raise ConfigError(
            f"torch_autocast.dtype is {section.dtype}, which is not supported: choose bfloat16; it needs no loss scale"
        )
    if precision != "fp32":
        raise ConfigError(
            f"torch_autocast and {precision} are enabled: autocast is for parameters in 32 bits; switch one of them off"
        )
    if root.tiering.accumulation == "layer":
        raise ConfigError('torch_autocast with tiering.accumulation "layer" is not supported: set it to "micro_batch"')
    return True


def _check_unmanaged(tiering: TieringSection) -> None:
    """Refuse what must know before a backward pass whether it is the last of its step.

    Raises:
        ConfigError: by the key.
    """
    for key, value, other in (
        ("update_schedule", "backward", "deferred"),
        ("accumulation", "layer", "micro_batch"),
    ):
        if getattr(tiering, key) == value:
            raise ConfigError(
                f"managed_gradient_accumulation is false, so that step() alone says where a step ends, but "
                f"tiering.{key} is {value}, which must know it before: set it to {other}"
            )


def _offload(section: OffloadSection) -> OffloadConfig:
    return OffloadConfig(section.device, None if section.nvme_path is None else Path(section.nvme_path))


def _monitors(root: RootSection) -> MonitorConfig:
    def directory(section: TensorBoardSection) -> Path | None:
        return Path(section.output_path, section.job_name) if section.enabled else None

    wandb = root.wandb
    return MonitorConfig(
        directory(root.tensorboard),
        directory(root.csv_monitor),
        WandbConfig(wandb.project, wandb.group, wandb.team) if wandb.enabled else None,
        root.wall_clock_breakdown,
    )


def _fp16(section: Fp16Section) -> Fp16Config:
    initial = 2.0**section.initial_scale_power
    if section.loss_scale == 0 and section.min_loss_scale > initial:
        raise ConfigError(
            f"fp16.min_loss_scale is {section.min_loss_scale:g}, above the scale to begin with, {initial:g} (2 to the "
            f"power of fp16.initial_scale_power, {section.initial_scale_power}); lower it or raise the power"
        )
    return Fp16Config(**section.model_dump(exclude={"enabled"}))


def default_tile_bytes(drives: int) -> int:
    """Bytes of a tile of optimizer states that live on so many drives, which share it; with none, in host memory."""
    return min(_HOST_TILE_BYTES, drives * _DRIVE_TILE_BYTES) or _HOST_TILE_BYTES


def _tiering(
    tiering: TieringSection, activation_checkpointing: ActivationSection, params: OffloadSection, states: OffloadSection
) -> TieringConfig:
    offloads = (params, states)
    nvme = [NvmeConfig(Path(n.path), n.capacity, n.bandwidth) for n in tiering.nvme]
    if not nvme:
        paths = dict.fromkeys(o.nvme_path for o in offloads if o.device == "nvme" and o.nvme_path is not None)
        nvme = [NvmeConfig(Path(path)) for path in paths]
    if not nvme and any(offload.device == "nvme" for offload in offloads):
        raise ConfigError(
            "an offload section has device nvme but no path is given: set tiering.nvme to "
            '[{"path": "/a/directory/on/the/drive"}], or nvme_path in the section'
        )
    activations = tiering.activations
    if activations == "auto":
        activations = "cpu" if activation_checkpointing.cpu_checkpointing else "none"
    if activations == "nvme" and not nvme:
        raise ConfigError(
            "tiering.activations is nvme but no path is given: set tiering.nvme to "
            '[{"path": "/a/directory/on/the/drive"}]'
        )
    if tiering.crash_consistent and "nvme" not in (params.device, states.device):
        raise ConfigError(
            "tiering.crash_consistent keeps every step on the drives, but nothing lives there: set "
            "zero_optimization.offload_optimizer.device to nvme (what host_memory has room for stays there, and is "
            "written through), or leave crash_consistent out and save checkpoints"
        )
    return TieringConfig(
        device_memory_bytes=tiering.device_memory,
        host_memory_bytes=tiering.host_memory,
        nvme=tuple(nvme),
        state_format=tiering.state_format,
        update_schedule=tiering.update_schedule,
        accumulation=tiering.accumulation,
        io_backend=tiering.io_backend,
        checksum=tiering.checksum,
        crash_consistent=tiering.crash_consistent,
        tile_size_bytes=tiering.tile_size or default_tile_bytes(len(nvme) if states.device == "nvme" else 0),
        activations=activations,
        activation_memory_bytes=tiering.activation_memory,
        timeline=None if tiering.timeline is None else Path(tiering.timeline),
        timeline_steps=tiering.timeline_steps,
        status=tiering.status,
    )
