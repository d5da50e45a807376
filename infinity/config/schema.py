"""The JSON file's sections, as pydantic models: types, ranges and every default, in one place.

The sections are DeepSpeed's (docs.deepspeed.ai, configuration JSON) plus `tiering`. The fields of the models have an
effect; keys.py lists the keys that have none, or are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from infinity.config.paths import expanded_path
from infinity.config.sizes import parse_size
from infinity.config.values import boolean

BLOCK_ALIGN_BYTES = 4096
MOST_IN_FLIGHT = 4096  # requests of 1 MiB: far more than any drive serves at a time
MOST_THREADS = 1024
ALL_RANKS = -1


def _number(value: Any) -> Any:
    """Refuse bool, which Python would accept as a number."""
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    return value


def _names(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise ValueError("give a name, or a list of names")
    return tuple(names)


def _count(value: Any) -> Any:
    """Convert a whole float to int: JSON reads the count 5e8 as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else _number(value)


def _size_or_auto(value: Any) -> Any:
    return None if value is None or value == "auto" else parse_size(value)


def _block_size(nbytes: int) -> int:
    if nbytes % BLOCK_ALIGN_BYTES:
        raise ValueError(f"it must be a multiple of {BLOCK_ALIGN_BYTES} bytes, which direct I/O needs, such as 1MiB")
    return nbytes


def _all_or_some(ranks: int) -> int:
    if ranks < 1 and ranks != ALL_RANKS:
        raise ValueError(f"it must be a number of ranks, or {ALL_RANKS} for all of them")
    return ranks


def _log_path(value: str) -> str:
    """Expand a path. An empty one stands for the working directory."""
    return value and expanded_path(value)


def _name(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Bool = Annotated[bool, BeforeValidator(boolean)]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_count), Field(lt=1 << 63)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
SizeOrAuto = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size_or_auto)]
FileName = Annotated[str, AfterValidator(expanded_path)]
LogPath = Annotated[str, AfterValidator(_log_path)]
Dtype = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(_name)]


class Section(BaseModel):
    """A section. The loader reports unknown keys, because it can suggest similar ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class NamedSection(Section):
    type: str
    params: dict[str, Any] = {}


class Fp16Section(Section):
    enabled: Bool = False
    loss_scale: Number = Field(0.0, ge=0)
    initial_scale_power: Count = Field(16, ge=0, le=60)
    loss_scale_window: Count = Field(1000, ge=1)
    hysteresis: Count = Field(2, ge=1)
    min_loss_scale: Number = Field(1.0, gt=0)
    consecutive_hysteresis: Bool = False
    auto_cast: Bool = False


class Bf16Section(Section):
    enabled: Bool = False


class AutocastSection(Section):
    enabled: Bool = False
    dtype: str = "bfloat16"


class DataTypesSection(Section):
    grad_accum_dtype: Dtype = "fp32"


class OffloadSection(Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: FileName | None = None


class OffloadOptimizerSection(OffloadSection):
    ratio: Annotated[Number, Field(ge=0, le=1)] | None = None


class LeafModuleSection(Section):
    classes: Names = ()
    names: Names = ()
    name_suffixes: Names = ()


# The first stage at which the states of a section may be offloaded.
OFFLOADED_FROM: Mapping[str, int] = {"offload_param": 3, "offload_optimizer": 1}


class ZeroSection(Section):
    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_count)] = 0
    offload_param: OffloadSection = OffloadSection()
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    param_persistence_threshold: Count = Field(100_000, ge=0, alias="stage3_param_persistence_threshold")
    # A float, because transformers sets it to a fraction of the hidden size's square.
    prefetch_bucket_size: Annotated[Number, Field(ge=0, lt=1 << 63)] | None = Field(
        None, alias="stage3_prefetch_bucket_size"
    )
    mics_shard_size: Annotated[Count, AfterValidator(_all_or_some)] = ALL_RANKS
    zero_hpz_partition_size: Annotated[Count, Field(ge=1)] = 1
    leaf_module: LeafModuleSection = LeafModuleSection()


class AioSection(Section):
    block_size: Annotated[Size, Field(le=1 << 30), AfterValidator(_block_size)] = 1 << 20
    queue_depth: Count = Field(32, ge=1, le=MOST_IN_FLIGHT)
    intra_op_parallelism: Count = Field(2, ge=1, le=MOST_THREADS)
    sqpoll: Bool = False
    iopoll: Bool = False
    use_gds: Bool = False


def _drives(value: Any) -> Any:
    """Refuse a path, a drive, or a list of paths with the right form: users often write these for a list of drives."""
    if isinstance(value, str):
        raise ValueError(f"write a list of drives: {json.dumps([{'path': value}])}")
    if isinstance(value, dict) and value:
        raise ValueError(f"write a list of drives: [{json.dumps(value, default=str)}]")
    if isinstance(value, list | tuple) and value and all(isinstance(drive, str) for drive in value):
        raise ValueError(f"write a list of objects: {json.dumps([{'path': drive} for drive in value])}")
    return value


class NvmeSection(Section):
    path: FileName
    capacity: SizeOrAuto = None
    bandwidth: SizeOrAuto = None


class TensorBoardSection(Section):
    enabled: Bool = False
    output_path: LogPath = ""
    job_name: FileName = "DeepSpeedJobName"


class WandbSection(Section):
    enabled: Bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class ActivationSection(Section):
    cpu_checkpointing: Bool = False


class TieringSection(Section):
    device_memory: SizeOrAuto = None
    fill_device: Bool | Literal["auto"] = "auto"
    device_headroom: Number = Field(0.05, ge=0, lt=1)
    host_memory: SizeOrAuto = None
    nvme: Annotated[list[NvmeSection], BeforeValidator(_drives)] = []
    state_format: Literal["auto", "fp32", "split", "master", "bf16", "int8"] = "auto"
    update_schedule: Literal["auto", "backward", "deferred", "speculative", "barrier"] = "auto"
    accumulation: Literal["micro_batch", "layer"] = "micro_batch"
    io_backend: Literal["auto", "io_uring", "threads", "aiofiles"] = "auto"
    checksum: Bool = False
    crash_consistent: Bool = False
    tile_size: SizeOrAuto = None
    max_unit_size: SizeOrAuto = None
    activations: Literal["auto", "none", "cpu", "nvme"] = "auto"
    activation_memory: Size = 256 << 20
    timeline: FileName | None = None
    timeline_steps: Count = Field(100, ge=1)
    status: Bool = True


class CommunicationSection(Section):
    timeout: Number = Field(300.0, gt=0)
    shard_size: Annotated[Count, Field(ge=1)] | None = None


class RootSection(Section):
    train_batch_size: Annotated[Count, Field(ge=1)] | None = None
    train_micro_batch_size_per_gpu: Annotated[Count, Field(ge=1)] | None = None
    gradient_accumulation_steps: Annotated[Count, Field(ge=1)] | None = None
    managed_gradient_accumulation: Bool = True
    dataloader_drop_last: Bool = False
    gradient_clipping: Number = Field(1.0, ge=0)
    communication_data_type: Dtype | None = None
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_name)] = "mean"
    communication: CommunicationSection = CommunicationSection()
    optimizer: NamedSection | None = None
    scheduler: NamedSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Field(Bf16Section(), alias="bfloat16")
    torch_autocast: AutocastSection = AutocastSection()
    data_types: DataTypesSection = DataTypesSection()
    zero_optimization: ZeroSection = ZeroSection()
    activation_checkpointing: ActivationSection = ActivationSection()
    aio: AioSection = AioSection()
    tensorboard: TensorBoardSection = TensorBoardSection()
    csv_monitor: TensorBoardSection = TensorBoardSection()
    wandb: WandbSection = WandbSection()
    wall_clock_breakdown: Bool = False
    tiering: TieringSection = TieringSection()
