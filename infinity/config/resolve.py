"""Resolve the sections of the file to a frozen `Config`: compute missing values, and refuse contradictions."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from infinity.config.paths import check_apart
from infinity.config.resolved import (
    AioConfig,
    CommunicationConfig,
    Config,
    Fp16Config,
    LeafModules,
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
    ALL_RANKS,
    OFFLOADED_FROM,
    ActivationSection,
    DataTypesSection,
    Fp16Section,
    NamedSection,
    OffloadSection,
    RootSection,
    TensorBoardSection,
    TieringSection,
    ZeroSection,
)
from infinity.config.values import boolean
from infinity.errors import ConfigError

_log = logging.getLogger(__name__)
# Size of a tile of optimizer states. A tile in host memory is large, so that the time between two tiles is small
# compared with the update. Tiles on NVMe are small, so that many are in flight.
_HOST_TILE_BYTES = 256 << 20  # 16 threads update it in 3 ms; Python, and waking the threads, takes 0.3 ms
_DRIVE_TILE_BYTES = 4 << 20
_DRIVES_TILE_BYTES = 16 << 20


def resolve(root: RootSection, world_size: int) -> Config:
    micro, accumulation, total = _batch_sizes(root, world_size)
    optimizer = OptimizerConfig(**_without_auto("optimizer", root.optimizer)) if root.optimizer else None
    precision = _precision(root)
    autocast = _autocast(root, precision)
    zero = _offloaded(root.zero_optimization)
    _check_ratio(zero)
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
        fp16=_fp16(root.fp16) if "fp16" in (precision, autocast) else None,
        optimizer=optimizer,
        scheduler=_scheduler(root.scheduler, optimizer) if root.scheduler else None,
        zero=ZeroConfig(
            stage=zero.stage,
            offload_param=_offload(zero.offload_param),
            offload_optimizer=_offload(zero.offload_optimizer, zero.offload_optimizer.ratio),
            param_persistence_threshold=zero.param_persistence_threshold,
            prefetch_numel=None if zero.prefetch_bucket_size is None else int(zero.prefetch_bucket_size),
            shard_size=_shard_size(root),
            leaf_modules=LeafModules(zero.leaf_module.classes, zero.leaf_module.names, zero.leaf_module.name_suffixes),
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
        autocast=autocast,
        casts_inputs=root.fp16.auto_cast and precision == "fp16",
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


def _offloaded(zero: ZeroSection) -> ZeroSection:
    """Return the section with device none for offloads that need a higher stage, and log a warning for each."""
    off = {}
    for name, least in OFFLOADED_FROM.items():
        section = getattr(zero, name)
        if zero.stage < least and section.device != "none":
            _log.warning(
                "zero_optimization.%s.device is %s, which does nothing at stage %d: these states stay on the device. "
                "Set zero_optimization.stage to %d to offload it",
                *(name, section.device, zero.stage, least),
            )
            off[name] = type(section)()
    return zero.model_copy(update=off)


def _check_ratio(zero: ZeroSection) -> None:
    ratio = zero.offload_optimizer.ratio
    if zero.offload_optimizer.device == "none" and ratio is not None and ratio < 1:
        raise ConfigError(
            f"zero_optimization.offload_optimizer.ratio is {ratio:g}, the share that is "
            "offloaded, but its device is none, which offloads nothing: set device to cpu or nvme, or leave ratio out"
        )


def _shard_size(root: RootSection) -> int | None:
    """Return how many ranks divide the states, by infinity's key or one of DeepSpeed's; None for all ranks."""
    zero, own = root.zero_optimization, root.communication.shard_size
    if own is not None and zero.stage == 0:
        raise ConfigError(
            f"communication.shard_size is {own}, but zero_optimization.stage 0 divides nothing among ranks: set stage "
            "to 1, 2 or 3, or remove the key"
        )
    mics = None if zero.mics_shard_size == ALL_RANKS else zero.mics_shard_size
    hpz = None if zero.zero_hpz_partition_size == 1 else zero.zero_hpz_partition_size
    given = {
        "communication.shard_size": own,
        "zero_optimization.mics_shard_size": mics,
        "zero_optimization.zero_hpz_partition_size": hpz,
    }
    chosen = {key: size for key, size in given.items() if size is not None}
    if zero.stage < 3:  # DeepSpeed's keys have no effect in DeepSpeed, either
        for key in chosen.keys() - {"communication.shard_size"}:
            _log.info("configuration key %s has no effect at stage %d; see communication.shard_size", key, zero.stage)
        return own
    if len(set(chosen.values())) > 1:
        both = " and ".join(f"{key} is {size}" for key, size in chosen.items())
        raise ConfigError(f"{both}: all of them say how many ranks divide the states among them; keep one")
    if "zero_optimization.zero_hpz_partition_size" in chosen and len(chosen) == 1:
        _log.warning(
            "zero_optimization.zero_hpz_partition_size is %d: gradients and optimizer states are divided among this "
            "number of ranks, too, while DeepSpeed divides them among all; see communication.shard_size",
            hpz,
        )
    return next(iter(chosen.values()), None)


def _batch_sizes(root: RootSection, world_size: int) -> tuple[int, int, int]:
    """Return (micro batch, accumulation steps, global batch). Any two of them determine the third."""
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


def _scheduler(section: NamedSection, optimizer: OptimizerConfig | None) -> SchedulerConfig:
    """Return the schedule. If its highest rate is "auto", it is the optimizer's rate."""
    resolved = SchedulerConfig(**_without_auto("scheduler", section))
    if section.params.get("warmup_max_lr") != "auto" or optimizer is None or "lr" not in optimizer.params:
        return resolved
    lr = optimizer.params["lr"]
    _log.info("configuration key scheduler.params.warmup_max_lr is auto: %s, the optimizer's", lr)
    return SchedulerConfig(resolved.type, {**resolved.params, "warmup_max_lr": lr})


def _without_auto(name: str, section: NamedSection) -> dict[str, Any]:
    """Return type and params of a section, without "auto" parameters, and with the strings "true", "false" as bool."""
    for key, value in section.params.items():
        if value == "auto":
            _log.info("configuration key %s.params.%s is auto: left to its default", name, key)
    params = {key: boolean(value) for key, value in section.params.items() if value != "auto"}
    return {"type": section.type, "params": params}


_AUTOCAST: dict[str, Precision] = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}


def _autocast(root: RootSection, precision: Precision) -> Precision | None:
    """Return the 16-bit dtype of the forward pass under `torch.autocast` over float32 parameters; None if it is off."""
    section = root.torch_autocast
    if not section.enabled:
        return None
    dtype = _AUTOCAST.get(section.dtype.removeprefix("torch."))
    if dtype is None:
        raise ConfigError(f"torch_autocast.dtype is {section.dtype}; choose bfloat16 or float16")
    if precision != "fp32":
        raise ConfigError(
            f"torch_autocast and {precision} are enabled: autocast is for parameters in 32 bits; switch one of them off"
        )
    if root.tiering.accumulation == "layer":
        raise ConfigError('torch_autocast with tiering.accumulation "layer" is not supported: set it to "micro_batch"')
    return dtype


def _check_unmanaged(tiering: TieringSection) -> None:
    """Refuse settings that must know before a backward pass whether it is the last of its step."""
    for key, value, other in (
        ("update_schedule", "backward", "deferred"),
        ("accumulation", "layer", "micro_batch"),
    ):
        if getattr(tiering, key) == value:
            raise ConfigError(
                f"managed_gradient_accumulation is false, so that step() alone says where a step ends, but "
                f"tiering.{key} is {value}, which must know it before: set it to {other}"
            )


def _offload(section: OffloadSection, ratio: float | None = None) -> OffloadConfig:
    return OffloadConfig(section.device, None if section.nvme_path is None else Path(section.nvme_path), ratio)


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
            f"fp16.min_loss_scale is {section.min_loss_scale:g}, above the initial scale, {initial:g} (2 to the "
            f"power of fp16.initial_scale_power, {section.initial_scale_power}); lower it or raise the power"
        )
    return Fp16Config(**section.model_dump(exclude={"enabled", "auto_cast"}))


def default_tile_bytes(drives: int) -> int:
    """Return the bytes of a tile of optimizer states on `drives` drives, which share it; in host memory if 0."""
    return min(_DRIVES_TILE_BYTES, drives * _DRIVE_TILE_BYTES) or _HOST_TILE_BYTES


def _tiering(
    tiering: TieringSection, activation_checkpointing: ActivationSection, params: OffloadSection, states: OffloadSection
) -> TieringConfig:
    offloads = (params, states)
    nvme = [NvmeConfig(Path(n.path), n.capacity, n.bandwidth) for n in tiering.nvme]
    check_apart("tiering.nvme", [drive.path for drive in nvme])
    if not nvme:
        paths = [o.nvme_path for o in offloads if o.device == "nvme" and o.nvme_path is not None]
        nvme = [NvmeConfig(Path(path)) for path in {os.path.realpath(path): path for path in paths}.values()]
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
            "tiering.crash_consistent keeps every step on the drives, but no states are assigned to them: set "
            "zero_optimization.offload_optimizer.device to nvme (states that fit in host_memory stay in memory, and "
            "each step also writes them to the drive), or leave crash_consistent out and save checkpoints"
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
        max_unit_size_bytes=tiering.max_unit_size,
        tile_size_bytes=tiering.tile_size or default_tile_bytes(len(nvme) if states.device == "nvme" else 0),
        activations=activations,
        activation_memory_bytes=tiering.activation_memory,
        timeline=None if tiering.timeline is None else Path(tiering.timeline),
        timeline_steps=tiering.timeline_steps,
        status=tiering.status,
        fill_device=tiering.fill_device,
        device_headroom=tiering.device_headroom,
    )
