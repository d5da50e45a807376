"""The training state outside of the tiers: hyper-parameters, LR schedule, random states, buffers, client's state."""

from __future__ import annotations

import io
import logging
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infinity.checkpoint.files import brief, read_plain
from infinity.checkpoint.format import EXTRA, Manifest
from infinity.errors import CheckpointError, InfinityError
from infinity.optim.optimizer import TieredOptimizer
from infinity.tiers import accelerator
from infinity.zero.step import Step

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """Which parts of a checkpoint are loaded, besides parameters and buffers.

    Attributes:
        optimizer: moments, number of updates of each parameter, and hyper-parameters of the parameter groups.
        lr_scheduler: the state of the LR schedule.
        progress: step counters, random states and loss scale.
    """

    optimizer: bool = True
    lr_scheduler: bool = True
    progress: bool = True


@dataclass(frozen=True)
class TrainingState:
    """The state of a training outside of its tiers: collected for a checkpoint, and set from one."""

    module: nn.Module
    optimizer: TieredOptimizer
    step: Step

    def collect(self, client_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that `apply` restores, as tensors and plain values."""
        lr_scheduler = self.step.lr_scheduler
        return {
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": None if lr_scheduler is None else _schedule_state(lr_scheduler),
            "loss_scale": self.step.losses.loss_scale.state_dict(),
            "rng": _rng_states(),
            "buffers": persistent_buffers(self.module),
            "tied": tied_names(self.module),
            "client_state": dict(client_state),
        }

    def check(self, path: Path, extra: Mapping[str, Any], parts: Parts) -> None:
        """Check that `apply` will accept the state. Nothing is changed.

        Args:
            path: path of the checkpoint, for messages.

        Raises:
            CheckpointError: something is missing or does not fit this run.
        """
        for key in ("optimizer", "loss_scale", "rng", "buffers", "client_state"):
            if not isinstance(extra.get(key), dict) and not _is_imported(key, extra):
                raise CheckpointError(f"{path} has no `{key}`: it was not saved by engine.save_checkpoint")
        if parts.progress:
            _check_loss_scale(path, extra["loss_scale"])
        if parts.optimizer and not _has_no_groups(extra):
            _check_groups(path, extra["optimizer"].get("param_groups"), self.optimizer)
        if parts.lr_scheduler:
            _check_schedule(path, extra.get("lr_scheduler"), self.step.lr_scheduler)
        _check_buffers(path, extra["buffers"], self.module)
        of_ranks = extra.get("rng_of_ranks", [])
        of_first = [] if _is_imported("rng", extra) else [extra["rng"]]
        for states in (*of_first, *(of_ranks if isinstance(of_ranks, list) else [None])):
            state = states.get("torch") if isinstance(states, dict) else None
            here = torch.get_rng_state()
            if not isinstance(state, torch.Tensor) or (state.shape, state.dtype) != (here.shape, here.dtype):
                raise CheckpointError(f"{path} has no random state that this version of torch takes")

    def apply(self, path: Path, rank: int, extra: Mapping[str, Any], parts: Parts) -> None:
        """Restore the state that `collect` returned. `check` must have passed.

        Args:
            path: path of the checkpoint, for messages.

        Raises:
            CheckpointError: a value does not fit this run. Others may have been set before.
        """
        lr_scheduler = self.step.lr_scheduler
        try:
            if parts.optimizer and not _has_no_groups(extra):
                self.optimizer.load_groups(extra["optimizer"])
            if parts.lr_scheduler and lr_scheduler is not None and extra["lr_scheduler"] is not None:
                lr_scheduler.load_state_dict(extra["lr_scheduler"])
            with torch.no_grad():
                for name, value in extra["buffers"].items():
                    self.module.get_buffer(name).copy_(value)  # converts to the dtype of this run's buffer
            if parts.progress:
                self.step.losses.loss_scale.load_state_dict(extra["loss_scale"])
                states = extra.get("rng_of_ranks", [])
                of_this_rank = states[rank] if rank < len(states) else extra["rng"]
                if of_this_rank is not None:
                    _set_rng_states(of_this_rank)
        except InfinityError:
            raise
        except Exception as error:  # schedules and torch raise various exceptions for values of another kind
            raise CheckpointError(
                f"{path}: its schedule, buffers, loss scale or random state does not fit this run: "
                f"{type(error).__name__}: {error}"
            ) from error


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tied parameters and buffers, each with the name that its values are stored by."""
    stored = {name: id(tensor) for name, tensor in (*module.named_parameters(), *persistent_buffers(module).items())}
    first = {key: name for name, key in reversed(stored.items())}
    buffers = persistent_buffers(module, remove_duplicate=False)
    every = (*module.named_parameters(remove_duplicate=False), *buffers.items())
    return {name: first[id(tensor)] for name, tensor in every if name not in stored and id(tensor) in first}


def read_extra(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """Read and check `extra.pt`.

    Raises:
        CheckpointError: the file is missing or damaged, or holds objects that are not tensors or plain values.
    """
    path = directory / EXTRA
    content = read_plain(path)
    if zlib.crc32(content) != manifest.extra_crc:
        raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest's")
    return unpacked(content, str(path))


def unpacked(content: bytes, what: str) -> dict[str, Any]:
    """Return the state that `TrainingState.collect` returned, from its bytes.

    Args:
        what: description of the bytes, for messages.

    Raises:
        CheckpointError: the bytes are something else, or hold objects that are not tensors or plain values.
    """
    try:
        extra = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged content can raise any exception
        raise CheckpointError(f"{what} cannot be loaded: {error}") from error
    if not isinstance(extra, dict):
        raise CheckpointError(f"{what} is damaged: it holds a {type(extra).__name__}")
    return extra


def _is_imported(key: str, extra: Mapping[str, Any]) -> bool:
    """Whether `key` is the random states and these are missing, because the checkpoint was imported."""
    return key == "rng" and key in extra and extra[key] is None


def _has_no_groups(extra: Mapping[str, Any]) -> bool:
    """Whether the checkpoint was imported without hyper-parameters, so that this run keeps its own."""
    return _is_imported("rng", extra) and extra["optimizer"].get("param_groups") == []


def _check_groups(path: Path, groups: Any, optimizer: TieredOptimizer) -> None:
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        count = len(groups) if isinstance(groups, list) else "no"
        raise CheckpointError(
            f"{path} has {count} parameter groups, this optimizer has {len(optimizer.param_groups)}: "
            "group the parameters as in the run that saved it"
        )
    for index, group in enumerate(groups):
        for name, default in optimizer.defaults.items():
            if not isinstance(group, dict) or (name not in group and name != "decoupled"):  # imported ones may lack it
                raise CheckpointError(f"{path} has no `{name}` for parameter group {index}: it is of another optimizer")
            if name in group and not _fits(group[name], default):
                raise CheckpointError(
                    f"{path} is damaged: `{name}` of parameter group {index} is {brief(group[name])}, where numbers "
                    f"such as {default!r} belong"
                )


def _fits(value: Any, default: Any) -> bool:
    """Whether a hyper-parameter is of its default's kind: a number, or a tuple of as many numbers."""
    if isinstance(default, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(default) and all(map(_fits, value, default))
    return not _is_number(default) or _is_number(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_loss_scale(path: Path, saved: Mapping[str, Any]) -> None:
    """Check that `LossScale.load_state_dict` will accept the state."""
    for name, value in saved.items():
        if not _is_number(value) or not math.isfinite(value) or (name == "value" and value <= 0):
            raise CheckpointError(f"{path} is damaged: `loss_scale.{name}` is {brief(value)}, which is no such number")


def _check_schedule(path: Path, state: Any, lr_scheduler: Any | None) -> None:
    if (state is None) != (lr_scheduler is None):
        saved, here = ("no LR schedule", "has one") if state is None else ("an LR schedule", "has none")
        _log.warning("%s has %s and this run %s: the learning rate continues from the saved value", path, saved, here)
        return
    if lr_scheduler is not None and (
        not isinstance(state, dict) or state.keys() != _schedule_state(lr_scheduler).keys()
    ):
        raise CheckpointError(
            f"{path} has the state of another LR schedule than {type(lr_scheduler).__name__}: "
            "configure the schedule that it was saved with"
        )


def _schedule_state(lr_scheduler: Any) -> dict[str, Any]:
    """Return the state of an LR schedule without functions (SWALR's state has one before torch 2.7)."""
    return {key: value for key, value in lr_scheduler.state_dict().items() if not callable(value)}


def _check_buffers(path: Path, saved: Mapping[str, Any], module: nn.Module) -> None:
    buffers = persistent_buffers(module)
    if saved.keys() != buffers.keys():
        name = min(saved.keys() ^ buffers.keys())
        side = "the model" if name in saved else "the checkpoint"
        raise CheckpointError(f"{path} is of another model: {side} has no buffer {name}")
    for name, value in saved.items():
        if not isinstance(value, torch.Tensor) or value.shape != buffers[name].shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(
                f"{path} has buffer {name} in shape {shape}; the model has {tuple(buffers[name].shape)}"
            )


def persistent_buffers(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """Return the persistent buffers by name: a module with several names by the first one, or by all of them."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=remove_duplicate)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=remove_duplicate)
        if name not in module._non_persistent_buffers_set
    }


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    device = accelerator()
    if device is not None:
        states[device.type] = torch.get_device_module(device).get_rng_state_all()
    return states


def _set_rng_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    device = accelerator()
    if device is None:
        return
    saved = states.get(device.type, [])
    if len(saved) == torch.accelerator.device_count():
        torch.get_device_module(device).set_rng_state_all(saved)
    elif saved:
        _log.warning("the random states of %d devices are not restored: this process has another number", len(saved))
