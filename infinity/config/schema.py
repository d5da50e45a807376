"""The JSON file's sections, as pydantic models: types, ranges and every default, in one place.

The surface is DeepSpeed's (docs.deepspeed.ai, configuration JSON) plus `tiering`. What a model here has as a
field is honoured; what changes nothing here, or is refused, is listed in keys.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from infinity.config.sizes import parse_size


def boolean(value: Any) -> Any:
    """Common files write "true" for true."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def _whole(value: Any) -> Any:
    """JSON files write 5e8 for counts, which JSON reads as a float."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Auto = Literal["auto"]
Bool = Annotated[bool, BeforeValidator(boolean)]
Count = Annotated[int, BeforeValidator(_whole)]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]


def _size_or_auto(value: Any) -> Any:
    return value if value == "auto" else parse_size(value)


SizeOrAuto = Annotated[int | Auto, BeforeValidator(_size_or_auto)]


class Section(BaseModel):
    """A section: unknown keys are reported by the loader, which knows their neighbours."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())


class OptimizerSection(Section):
    type: str
    params: dict[str, Any] = {}


class SchedulerSection(Section):
    type: str
    params: dict[str, Any] = {}


class Fp16Section(Section):
    enabled: Bool | Auto = False
    loss_scale: Annotated[float, Field(ge=0)] | Auto = 0.0
    initial_scale_power: Annotated[Count, Field(ge=0, le=60)] | Auto = 16
    loss_scale_window: Annotated[Count, Field(ge=1)] | Auto = 1000
    hysteresis: Annotated[Count, Field(ge=1)] | Auto = 2
    min_loss_scale: Annotated[float, Field(gt=0)] | Auto = 1.0
    consecutive_hysteresis: Bool | Auto = False


class Bf16Section(Section):
    enabled: Bool | Auto = False


class OffloadSection(Section):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None


class ZeroSection(Section):
    stage: Literal[0, 1, 2, 3] = 0
    offload_param: OffloadSection = OffloadSection()
    offload_optimizer: OffloadSection = OffloadSection()
    stage3_param_persistence_threshold: Annotated[Count, Field(ge=0)] | Auto = 100_000


class AioSection(Section):
    block_size: Size = 1 << 20
    queue_depth: Count = Field(32, ge=1)
    intra_op_parallelism: Count = Field(2, ge=1)
    sqpoll: Bool = False
    iopoll: Bool = False
    use_gds: Bool = False


class NvmeSection(Section):
    path: str
    capacity: SizeOrAuto = "auto"
    bandwidth: SizeOrAuto = "auto"


class TieringSection(Section):
    device_memory: SizeOrAuto = "auto"
    host_memory: SizeOrAuto = "auto"
    nvme: list[NvmeSection] = []
    state_format: Literal["auto", "fp32", "split", "master", "bf16", "int8"] = "auto"
    update_schedule: Literal["auto", "backward", "deferred", "barrier"] = "auto"
    io_backend: Literal["auto", "io_uring", "threads", "aiofiles"] = "auto"
    checksum: Bool = False
    tile_size: Size = 16 << 20


class RootSection(Section):
    train_batch_size: Count | Auto | None = Field(None)
    train_micro_batch_size_per_gpu: Count | Auto | None = Field(None)
    gradient_accumulation_steps: Count | Auto | None = Field(None)
    gradient_clipping: float | Auto = 1.0
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Field(Bf16Section(), alias="bfloat16")
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    tiering: TieringSection = TieringSection()
