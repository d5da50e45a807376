"""Read a configuration: a JSON file or a mapping in, a frozen `Config` out."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from infinity.config.keys import NO_EFFECT, REFUSED
from infinity.config.resolved import (
    AioConfig,
    Config,
    Fp16Config,
    NvmeConfig,
    OffloadConfig,
    OptimizerConfig,
    SchedulerConfig,
    TieringConfig,
    ZeroConfig,
)
from infinity.config.schema import (
    Fp16Section,
    OffloadSection,
    RootSection,
    SchedulerSection,
    TieringSection,
    ZeroSection,
    boolean,
)
from infinity.errors import ConfigError

_log = logging.getLogger(__name__)


ConfigSource = str | Path | Mapping[str, Any]


def load_config(source: ConfigSource, *, auto: Mapping[str, Any] | None = None, world_size: int = 1) -> Config:
    """Parse, check and resolve a configuration.

    Args:
        source: path of a JSON file, or its content as a mapping. Dotted keys stand for nested ones.
        auto: values for keys that the source leaves "auto", by dotted path. The others get their defaults, or follow
            from the rest; a log line says for each what it became.
        world_size: ranks that share the global batch.

    Raises:
        ConfigError: a key that is unknown or refused, a value of the wrong kind, or sizes that contradict one
            another. The message names the key and says what to do.
    """
    values = _nest(_read(source))
    _fill(values, auto or {})
    known = dict(_known_keys(RootSection))
    for path in list(_leaves(values, known)):
        if path in REFUSED:
            raise ConfigError(f"{path}: {REFUSED[path]}; remove the key")
        if path in NO_EFFECT:
            _log.info("configuration key %s has no effect here: %s", path, NO_EFFECT[path])
            _remove(values, path)
        elif path not in known:
            raise ConfigError(_unknown(path, known))
    try:
        root = RootSection.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None
    return _resolve(root, world_size)


# Reading #


def _read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `values` with dotted keys (`zero_optimization.stage`) turned into nested ones."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        head, _, rest = key.partition(".")
        if rest:
            value = {rest: value}
        nested[head] = _merge(nested.get(head), _nest(value)) if isinstance(value, Mapping) else value
    return nested


def _merge(below: Any, above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, section by section."""
    if not isinstance(below, dict):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _merge(merged.get(key), value) if isinstance(value, dict) else value
    return merged


def _fill(values: dict[str, Any], auto: Mapping[str, Any]) -> None:
    """Put in what was given for keys that are "auto".

    Raises:
        ConfigError: the source does not have the key, or has a value for it.
    """
    for path, value in auto.items():
        *parents, last = path.split(".")
        section: Any = values
        for parent in parents:
            section = section.get(parent) if isinstance(section, dict) else None
        if not isinstance(section, dict) or section.get(last) != "auto":
            found = section.get(last) if isinstance(section, dict) else None
            raise ConfigError(f"a value is given for {path}, which is {found!r} in the configuration and not 'auto'")
        section[last] = value
        _log.info("configuration key %s is auto: %s was given", path, value)


# Keys #


def _known_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel] | None]]:
    """Dotted paths of a section's fields, with the sub-section that a path stands for, if any."""
    for name, field in section.model_fields.items():
        candidates = (field.annotation, *get_args(field.annotation))
        inner = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
        for spelling in filter(None, (name, field.alias)):
            yield prefix + spelling, inner
            if inner is not None:
                yield from _known_keys(inner, f"{prefix}{spelling}.")


def _leaves(values: Mapping[str, Any], known: Mapping[str, type[BaseModel] | None], prefix: str = "") -> Iterator[str]:
    """Dotted paths of the keys of a mapping, down to where the schema has no sub-section."""
    for key, value in values.items():
        path = prefix + key
        yield path
        if isinstance(value, Mapping) and known.get(path) is not None:
            yield from _leaves(value, known, path + ".")


def _remove(values: dict[str, Any], path: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        values = values[parent]
    values.pop(last, None)


def _unknown(path: str, known: Mapping[str, object]) -> str:
    everything = [*known, *NO_EFFECT, *REFUSED]
    parent = path.rpartition(".")[0]
    siblings = [key for key in everything if key.rpartition(".")[0] == parent]
    nearest = difflib.get_close_matches(path, siblings, 1, 0.6) or difflib.get_close_matches(path, everything, 1, 0.6)
    hint = f"did you mean `{nearest[0]}`?" if nearest else "docs/configuration.md lists the known keys"
    return f"unknown configuration key `{path}`: {hint}"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    path = ".".join(
        str(part) for part in problem["loc"] if not str(part).startswith(("literal", "function", "int", "bool"))
    )
    return f"{path} is {problem['input']!r}: {problem['msg']}"


# Resolving #


def _resolve(root: RootSection, world_size: int) -> Config:
    micro, accumulation, total = _batch_sizes(root, world_size)
    optimizer = OptimizerConfig(**_without_auto("optimizer", root.optimizer)) if root.optimizer else None
    fp16 = root.fp16.enabled is True
    bf16 = root.bf16.enabled is True
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; enable one")
    zero = root.zero_optimization
    _check_placement(zero)
    threshold = zero.stage3_param_persistence_threshold
    default_threshold = type(zero)().stage3_param_persistence_threshold
    return Config(
        train_batch_size=total,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=1.0 if root.gradient_clipping == "auto" else float(root.gradient_clipping),
        precision="fp16" if fp16 else "bf16" if bf16 else "fp32",
        fp16=_fp16(root.fp16) if fp16 else None,
        optimizer=optimizer,
        scheduler=_scheduler(root.scheduler, optimizer) if root.scheduler else None,
        zero=ZeroConfig(
            stage=zero.stage,
            offload_param=_offload(zero.offload_param),
            offload_optimizer=_offload(zero.offload_optimizer),
            param_persistence_threshold=int(default_threshold if threshold == "auto" else threshold),
        ),
        tiering=_tiering(root.tiering, zero.offload_param, zero.offload_optimizer),
        aio=AioConfig(
            root.aio.block_size,
            root.aio.queue_depth,
            root.aio.intra_op_parallelism,
            root.aio.sqpoll,
            root.aio.iopoll,
            root.aio.use_gds,
        ),
    )


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
    given = {
        "train_micro_batch_size_per_gpu": root.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": root.gradient_accumulation_steps,
        "train_batch_size": root.train_batch_size,
    }
    numbers = {name: None if value == "auto" else value for name, value in given.items()}
    for name, value in numbers.items():
        if value is not None and int(value) < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    micro, accumulation, total = (None if value is None else int(value) for value in numbers.values())
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


def _offload(section: OffloadSection) -> OffloadConfig:
    return OffloadConfig(section.device, None if section.nvme_path is None else Path(section.nvme_path))


def _fp16(section: Fp16Section) -> Fp16Config:
    """The loss scale, with "auto" replaced by the defaults."""
    values = section.model_dump(exclude={"enabled"})
    defaults = Fp16Section().model_dump(exclude={"enabled"})
    return Fp16Config(**{key: defaults[key] if value == "auto" else value for key, value in values.items()})


def _or_none(size: int | str) -> int | None:
    return None if size == "auto" else int(size)


def _tiering(tiering: TieringSection, *offloads: OffloadSection) -> TieringConfig:
    nvme = [NvmeConfig(Path(n.path), _or_none(n.capacity), _or_none(n.bandwidth)) for n in tiering.nvme]
    if not nvme:
        paths = dict.fromkeys(o.nvme_path for o in offloads if o.device == "nvme" and o.nvme_path is not None)
        nvme = [NvmeConfig(Path(path)) for path in paths]
    if not nvme and any(offload.device == "nvme" for offload in offloads):
        raise ConfigError(
            "an offload section has device nvme but no path is given: set tiering.nvme to "
            '[{"path": "/a/directory/on/the/drive"}], or nvme_path in the section'
        )
    return TieringConfig(
        device_memory_bytes=_or_none(tiering.device_memory),
        host_memory_bytes=_or_none(tiering.host_memory),
        nvme=tuple(nvme),
        state_format=tiering.state_format,
        update_schedule=tiering.update_schedule,
        io_backend=tiering.io_backend,
        checksum=tiering.checksum,
        tile_size_bytes=tiering.tile_size,
    )
