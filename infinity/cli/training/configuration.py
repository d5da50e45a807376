"""The configuration of a training: a file, or defaults without one, with the changes of the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infinity.cli.ready import ready_configuration
from infinity.cli.training.schedule import KINDS, Schedule
from infinity.config import with_values
from infinity.errors import ConfigError

_BASE = "nvme-all-memory"
_SECTIONS = ("fp16", "bf16", "bfloat16")
_WITH_WARMUP = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_WARMUP_SHARE = 20  # without a configuration file, 1/20 of the steps is warm-up
_ASKED_FOR = ("cycle_min_lr", "cycle_max_lr")  # required parameters that no option can set


@dataclass(frozen=True)
class ConfigOptions:
    """Options that replace a configuration file, or some of its values.

    Attributes:
        config: the file; None for states on `nvme`.
        nvme: directories on the drives.
        lr: None for the file's; without a file, `default_lr`.
        warmup, schedule: None for the file's.
        precision: None for the file's; without a file, or if the file says "auto", the measured one.
        tensorboard: directory of the event files; None for the file's.
        wandb: name of the project; None for the file's.
    """

    config: Path | None
    nvme: tuple[Path, ...] = ()
    host_memory: str | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    lr: float | None = None
    default_lr: float = 3e-4
    warmup: int | None = None
    schedule: str | None = None
    precision: str | None = None
    tensorboard: Path | None = None
    wandb: str | None = None


def base_values(options: ConfigOptions, measured: Callable[[], str]) -> dict[str, Any]:
    """Return the configuration without its schedule, which needs the number of steps.

    Args:
        measured: measures and returns the best precision of the device; called only if nothing else sets it.

    Raises:
        ConfigError: neither a file nor a drive is given, the file cannot be read, or it has a value "auto" that no
            option sets; the message names both.
    """
    if options.config is None and not options.nvme:
        raise ConfigError(
            "no place for the states is given: give --nvme DIRECTORY on a fast local drive, or --config with a file or "
            "the name of a ready configuration (`infinity configs` lists them)"
        )
    changes: dict[str, Any] = {}
    if options.nvme:
        changes["tiering.nvme"] = [{"path": str(path)} for path in options.nvme]
    if options.host_memory is not None:
        changes["tiering.host_memory"] = options.host_memory
    if options.micro_batch_size is not None:
        changes["train_micro_batch_size_per_gpu"] = options.micro_batch_size
    if options.accumulation is not None:
        changes["gradient_accumulation_steps"] = options.accumulation
    lr = options.lr if options.lr is not None or options.config is not None else options.default_lr
    if lr is not None:
        changes["optimizer.params.lr"] = lr
    changes |= _monitors(options)
    values = with_values(options.config or ready_configuration(_BASE), changes)
    if options.micro_batch_size is not None or options.accumulation is not None:
        values.pop("train_batch_size", None)  # it is computed from the new values
    if lr is not None:
        values["optimizer"].setdefault("type", "AdamW")
    elif _optimizer_params(values).get("lr") == "auto":
        raise ConfigError(f'optimizer.params.lr is "auto" in {options.config}: give the learning rate by --lr')
    precision = options.precision
    if precision is None and (options.config is None or precision_is_auto(values)):
        precision = measured()
    return values if precision is None else with_precision(values, precision)


def with_precision(values: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Return the configuration with another precision: `fp32`, `bf16` or `fp16`."""
    kept = {key: value for key, value in values.items() if key not in _SECTIONS}
    return kept if precision == "fp32" else {**kept, precision: {"enabled": True}}


def with_schedule(
    values: Mapping[str, Any], options: ConfigOptions, steps: int
) -> tuple[dict[str, Any], Schedule | None]:
    """Return the configuration for a run of `steps` steps, and the schedule that replaces the file's, or None.

    Raises:
        ConfigError: --warmup is given but the file's schedule has no warm-up; or a parameter that no option sets is
            "auto".
    """
    kind, warmup = options.schedule, options.warmup
    section = values.get("scheduler")
    if options.config is None:
        kind = kind or "linear"
        warmup = steps // _WARMUP_SHARE if warmup is None else warmup
    elif kind is None and not section and warmup is not None:
        kind = "constant"
    if kind is not None:
        return {key: value for key, value in values.items() if key != "scheduler"}, Schedule(kind, warmup or 0, steps)
    if not section:
        return dict(values), None
    if warmup is not None and section.get("type") not in _WITH_WARMUP:
        raise ConfigError(
            f"--warmup is {warmup}, but scheduler.type is {section.get('type')} in {options.config}, which has no "
            f"warm-up: leave the option out, or give --schedule ({', '.join(KINDS)})"
        )
    params = dict(section.get("params") or {})
    for key in _ASKED_FOR:
        if params.get(key) == "auto":
            raise ConfigError(
                f'scheduler.params.{key} is "auto" in {options.config}: write a number there, or give --schedule'
            )
    if params.get("total_num_steps") == "auto":
        params["total_num_steps"] = steps
    if warmup is not None or params.get("warmup_num_steps") == "auto":
        params["warmup_num_steps"] = warmup or 0
    return {**values, "scheduler": {**section, "params": params}}, None


def _optimizer_params(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of the optimizer section; empty if there are none."""
    section = values.get("optimizer")
    params = section.get("params") if isinstance(section, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def precision_is_auto(values: Mapping[str, Any]) -> bool:
    """Whether the file sets the precision to "auto"."""
    sections = [values.get(name) for name in _SECTIONS]
    enabled = [section.get("enabled") for section in sections if isinstance(section, Mapping)]
    return "auto" in enabled and not any(value is True or value == "true" for value in enabled)


def _monitors(options: ConfigOptions) -> dict[str, Any]:
    """Return the keys that enable monitors."""
    for option, package, wanted in (
        ("--tensorboard", "tensorboard", options.tensorboard),
        ("--wandb", "wandb", options.wandb),
    ):
        if wanted is not None and find_spec(package) is None:
            raise ConfigError(
                f"{option} {wanted} needs the package {package}: python -m pip install {package}, or leave {option} out"
            )
    changes: dict[str, Any] = {}
    if options.tensorboard is not None:
        changes["tensorboard"] = {"enabled": True, "output_path": str(options.tensorboard), "job_name": "."}
    if options.wandb is not None:
        changes["wandb.enabled"] = True
        changes["wandb.project"] = options.wandb
    return changes
