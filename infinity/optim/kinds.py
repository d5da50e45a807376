"""The supported optimizers: their hyper-parameters, the sources of these, and their update rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from infinity.config import Config
from infinity.config.values import number, switch
from infinity.errors import ConfigError
from infinity.kernels import AdagradHyper, Hyper, Rule, SgdHyper
from infinity.optim.plain import Lion, betas_of, lion_rule

Values = Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerKind:
    """The properties of one optimizer.

    Attributes:
        layout: the optimizer's name in formats.py.
        defaults: every hyper-parameter of a group, with torch's names and values.
        rule: returns the rule of an update for (values of a group, step, gradient scale).
        torch_classes: torch's classes of this optimizer.
        unsupported: options of these classes that must be off.
    """

    layout: str
    defaults: Values
    rule: Callable[[Values, int, float], Rule]
    torch_classes: tuple[type[torch.optim.Optimizer], ...] = ()
    unsupported: tuple[str, ...] = ()


def _adam(values: Values, step: int, grad_scale: float) -> Rule:
    beta1, beta2 = betas_of(values)
    numbers = {name: float(values[name]) for name in ("lr", "eps", "weight_decay")}
    decoupled = bool(values["decoupled"])
    return Hyper(**numbers, beta1=beta1, beta2=beta2, step=step, decoupled=decoupled, grad_scale=grad_scale)


def adagrad_rule(values: Values, step: int, grad_scale: float) -> Rule:
    numbers = {name: float(values[name]) for name in ("lr", "lr_decay", "eps", "weight_decay")}
    return AdagradHyper(**numbers, step=step, grad_scale=grad_scale)


def _sgd(values: Values, step: int, grad_scale: float) -> Rule:
    numbers = {name: float(values[name]) for name in ("lr", "momentum", "weight_decay")}
    return SgdHyper(**numbers, step=step, nesterov=bool(values["nesterov"]), grad_scale=grad_scale)


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}

ADAM = OptimizerKind("adamw", _ADAM, _adam, (torch.optim.Adam, torch.optim.AdamW), ("amsgrad", "maximize"))
ADAGRAD = OptimizerKind(
    "adagrad",
    {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0},
    adagrad_rule,
    (torch.optim.Adagrad,),
    ("initial_accumulator_value", "maximize"),
)
LION = OptimizerKind("lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}, lion_rule, (Lion,))
SGD = OptimizerKind(
    "sgd",
    {"lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
    _sgd,
    (torch.optim.SGD,),
    ("dampening", "maximize"),
)
KINDS = (ADAM, ADAGRAD, LION, SGD)

# By `optimizer.type` of the configuration, in lower case.
_BY_TYPE = {"adam": ADAM, "adamw": ADAM, "adagrad": ADAGRAD, "lion": LION, "sgd": SGD}
# Options of torch's groups that only select an implementation, or that `kind_of` has checked.
_FOR_TORCH_ALONE = (
    "amsgrad",
    "capturable",
    "dampening",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fp32_optimizer_states",
    "fused",
    "initial_accumulator_value",
    "maximize",
)
_WITHOUT_EFFECT = ("torch_adam", "adam_w_mode", "fused", "foreach", "fp32_optimizer_states")


def kind_from_config(type_name: str, params: Values) -> tuple[OptimizerKind, dict[str, Any]]:
    """Return the optimizer of the configuration's section `optimizer`, and the hyper-parameters in the section.

    `Adam` uses AdamW's weight decay unless `adam_w_mode` is false.

    Raises:
        ConfigError: an unknown optimizer or parameter, or an unsupported option.
    """
    name = type_name.lower()
    if name not in _BY_TYPE:
        raise ConfigError(f"optimizer.type is {type_name!r}; choose Adam, AdamW, Adagrad, Lion or SGD")
    kind = _BY_TYPE[name]
    values = {key: _checked(key, value) for key, value in params.items() if key in _names(kind)}
    fixed = {"bias_correction": True, "amsgrad": False, **dict.fromkeys(kind.unsupported, False)}
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm is given: gradients are clipped by gradient_clipping; move it"
        )
    for key in params.keys() - values.keys() - set(_WITHOUT_EFFECT):
        if key not in fixed:
            raise ConfigError(f"optimizer.params.{key} is unknown to {type_name}; it has {', '.join(_names(kind))}")
        if bool(params[key]) is not fixed[key]:
            raise ConfigError(f"optimizer.params.{key} is {params[key]!r}, which is not supported; leave it out")
    if kind is ADAM:
        decoupled = switch("optimizer.params.adam_w_mode", params.get("adam_w_mode", True))
        values["decoupled"] = name == "adamw" or decoupled
    return kind, values


def named_optimizer(config: Config) -> tuple[OptimizerKind, dict[str, Any]]:
    """Return the optimizer, AdamW if none is named, and the hyper-parameters in the configuration.

    Raises like `kind_from_config`.
    """
    return (ADAM, {}) if config.optimizer is None else kind_from_config(config.optimizer.type, config.optimizer.params)


def _checked(key: str, value: Any) -> Any:
    """Return a hyper-parameter of the configuration. Raise ConfigError if torch's optimizers would refuse its value."""
    path = f"optimizer.params.{key}"
    if key == "nesterov":
        return switch(path, value)
    if key != "betas":
        return number(path, value, least=0)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ConfigError(f"{path} is {value!r}; it must be two numbers, such as [0.9, 0.999]")
    return tuple(number(f"{path}[{index}]", beta, least=0, below=1) for index, beta in enumerate(value))


def kind_of(optimizer: torch.optim.Optimizer, *, also_adam: bool = False) -> tuple[OptimizerKind, list[dict[str, Any]]]:
    """Return the kind of a user's torch optimizer, and its parameter groups with the names of `OptimizerKind`.

    Other keys of the groups are kept, because schedulers store their bounds in them.

    Args:
        also_adam: whether the optimizer is one of `infinity.optim`.

    Raises:
        ConfigError: the optimizer, or an option that it uses, is not supported.
    """
    kind = ADAM if also_adam else None
    kind = next((kind for kind in KINDS if isinstance(optimizer, kind.torch_classes)), kind)
    if kind is None:
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be tiered; pass torch.optim's Adam, AdamW, Adagrad or SGD, "
            "or name one in the configuration"
        )
    _check_step(optimizer, kind)
    if _has_stepped(optimizer):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} has taken steps, and its states cannot be taken over: pass a new "
            "one, or resume from a checkpoint of the engine"
        )
    groups = []
    for group in optimizer.param_groups:
        for option in kind.unsupported:
            if group.get(option):
                raise ConfigError(f"optimizer option {option}={group[option]} is not supported; leave it out")
        kept = {key: value for key, value in group.items() if key not in _FOR_TORCH_ALONE}
        if kind is ADAM:
            own = getattr(optimizer, "decoupled", isinstance(optimizer, torch.optim.AdamW))  # infinity.optim sets it
            kept["decoupled"] = bool(group.get("decoupled_weight_decay", own))
        groups.append(kept)
    return kind, groups


def _check_step(optimizer: torch.optim.Optimizer, kind: OptimizerKind) -> None:
    """Refuse an optimizer that does more than its kind's update, which the engine would ignore."""
    cls = type(optimizer)
    known = next(each for each in cls.__mro__ if each in kind.torch_classes or each.__module__.startswith("infinity."))
    if cls is not known:
        raise ConfigError(
            f"optimizer {cls.__name__} is a subclass of {known.__name__}, whose update the engine would compute in "
            f"place of {cls.__name__}'s own: pass a {known.__name__} itself"
        )
    own = vars(optimizer).get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):  # torch's schedulers wrap it
        raise ConfigError(
            f"`step` of this {cls.__name__} was replaced, which the engine would not call: leave it as it is"
        )
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, name, None):
            raise ConfigError(
                f"this {cls.__name__} has step hooks, which the engine would not call: register them on the optimizer "
                "that initialize returns"
            )


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(optimizer, torch.optim.Adagrad):  # Adagrad has states from the start
        return bool(optimizer.state) or bool(getattr(optimizer, "has_stepped", False))
    return any(float(state["step"]) > 0 for state in optimizer.state.values())


def _names(kind: OptimizerKind) -> list[str]:
    return [name for name in kind.defaults if name != "decoupled"]
