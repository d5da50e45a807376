"""Convert the state outside of parameters (counters, groups, schedule, loss scale, buffers) from DeepSpeed's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from infinity.checkpoint.deepspeed_files import DeepSpeedFiles
from infinity.checkpoint.imported import plain_extra
from infinity.checkpoint.pickles import ForeignObject, stranger, whole
from infinity.errors import CheckpointError, ConfigError
from infinity.optim.kinds import ADAM, kind_from_config

# Keys that DeepSpeed itself puts into its model states. All others are of the client's state.
_OWN = frozenset(
    {
        "autoep_layers",
        "buffer_names",
        "checkpoint_parallel_dimensions",
        "data_sampler",
        "dp_world_size",
        "ds_autoep_layers",
        "ds_config",
        "ds_version",
        "frozen_param_fragments",
        "frozen_param_shapes",
        "global_samples",
        "global_steps",
        "lr_scheduler",
        "module",
        "mp_world_size",
        "num_experts",
        "optimizer",
        "param_shapes",
        "random_ltd",
        "shared_params",
        "skipped_steps",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "universal_checkpoint_info",
    }
)
# Keys of a parameter group that are no hyper-parameters, or that the engine stores under another name.
_LEFT_OUT = frozenset(
    {
        "params",
        "step",
        "bias_correction",
        "amsgrad",
        "capturable",
        "dampening",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "maximize",
        "moe",
    }
)


def counters_of(files: DeepSpeedFiles) -> dict[str, int]:
    """Return the engine's step counters."""
    model, config = files.models[0], _config(files)
    steps = int(model.get("global_steps") or 0)
    accumulation = config.get("gradient_accumulation_steps")
    per_step = accumulation if type(accumulation) is int and accumulation > 0 else 1
    return {
        "global_steps": steps,
        "micro_steps": steps * per_step,
        "skipped_steps": int(model.get("skipped_steps") or 0),
    }


def extra_of(files: DeepSpeedFiles, param_names: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the content of `extra.pt`, and a sentence about each value that was left out."""
    model, notes = files.models[0], []
    groups = _param_groups(files)
    client = {key: value for key, value in model.items() if isinstance(key, str) and key not in _OWN}
    for key in [key for key in client if stranger(client[key]) is not None]:
        notes.append(f"client_state `{key}` is left out: it holds a {stranger(client.pop(key))}, and no plain values")
    for key in ("data_sampler", "random_ltd"):
        if model.get(key):
            notes.append(f"`{key}` is left out: the engine has no such part")
    buffers = _buffers(model, param_names)
    schedule = _schedule(model.get("lr_scheduler"), [float(group["lr"]) for group in groups if "lr" in group])
    extra = plain_extra(
        groups=groups,
        lr_scheduler=schedule,
        loss_scale=_loss_scale(files),
        buffers=buffers,
        client_state=client,
    )
    return whole(extra), tuple(notes)


def _config(files: DeepSpeedFiles) -> Mapping[str, Any]:
    config = files.models[0].get("ds_config")
    return config if isinstance(config, Mapping) else {}


def _param_groups(files: DeepSpeedFiles) -> list[dict[str, Any]]:
    """Return the groups' hyper-parameters, as far as the checkpoint has them."""
    configured = _decoupled(_config(files))
    groups = []
    for group in files.param_groups:
        found = {key: value for key, value in group.items() if key not in _LEFT_OUT and stranger(value) is None}
        if "betas" in found:
            found["betas"] = tuple(found["betas"])
        decoupled = group.get("decoupled_weight_decay", configured)
        if "eps" in found and "betas" in found and decoupled is not None:
            found["decoupled"] = bool(decoupled)
        groups.append(found)
    return groups


def _decoupled(config: Mapping[str, Any]) -> bool | None:
    """Whether the Adam of the config's optimizer section decays weights as AdamW does; None if it has no Adam."""
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        return None
    params = section.get("params") or {}
    mode = {"adam_w_mode": params["adam_w_mode"]} if "adam_w_mode" in params else {}
    try:
        kind, values = kind_from_config(section["type"], mode)
    except ConfigError as error:
        raise CheckpointError(f"its states are of an optimizer that the engine does not have: {error}") from error
    return bool(values["decoupled"]) if kind is ADAM else None


def _schedule(state: Any, rates: list[float]) -> dict[str, Any] | None:
    """Return the LR schedule's state, in the form of this library's or torch's schedules."""
    if not isinstance(state, Mapping):
        return None
    if set(state) == {"last_batch_iteration"}:  # a schedule of DeepSpeed: it counts from -1, this library's from 0
        finished = int(state["last_batch_iteration"]) + 1
        return {"last_epoch": finished, "_step_count": finished + 1, "_last_lr": rates}
    return {key: value for key, value in state.items() if stranger(value) is None}


def _loss_scale(files: DeepSpeedFiles) -> dict[str, float] | None:
    """Return the state of a dynamic loss scale; None if there is none. Both libraries change it by the same rules."""
    scaler = files.states(0).get("loss_scaler")
    if not isinstance(scaler, ForeignObject) or scaler.get("cur_scale") is None:
        return None
    shift, left = scaler.get("delayed_shift"), scaler.get("cur_hysteresis")
    last = scaler.get("last_overflow_iter")
    return {
        "value": float(scaler.get("cur_scale")),
        "step": int(scaler.get("cur_iter") or 0),
        "last_overflow": -1 if last is None else int(last),
        "forgiven": max(0, int(shift) - int(left)) if shift is not None and left is not None else 0,
    }


def _buffers(model: Mapping[str, Any], param_names: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return the persistent buffers, by name."""
    names, module = model.get("buffer_names") or [], model.get("module")
    if not isinstance(module, Mapping):
        return {}
    return {
        str(name): whole(module[name]).clone()
        for name in names
        if name not in param_names and isinstance(module.get(name), torch.Tensor)
    }
