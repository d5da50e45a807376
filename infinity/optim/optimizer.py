"""The optimizer object that a training loop and its LR scheduler hold; the engine does the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.kernels import Hyper

_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decoupled": True,
}

ParamsOrGroups = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


class TieredOptimizer(torch.optim.Optimizer):
    """`param_groups` of a model whose states live in the tiers.

    Every group has `lr`, `betas`, `eps`, `weight_decay` and `decoupled` (AdamW's weight decay, else Adam's), and
    may be changed between steps, by hand or by any torch LR scheduler.

    Attributes:
        run_step: what `step()` does; the engine that owns the states sets it.
    """

    def __init__(self, params: ParamsOrGroups, defaults: Mapping[str, Any]) -> None:
        super().__init__(params, {**_DEFAULTS, **defaults})  # type: ignore[arg-type]
        self.run_step: Callable[[], None] | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; the engine's `step()` calls this."""
        if closure is not None:
            raise ConfigError("closures need several backward passes a step; call engine.backward() and engine.step()")
        if self.run_step is None:
            raise InfinityError("this optimizer belongs to no engine; infinity.initialize makes one that does")
        self.run_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients leave the parameters as backward produces them."""

    def state_dict(self) -> dict[str, Any]:
        """The groups' hyper-parameters; the states themselves are saved by `engine.save_checkpoint`."""
        return {"param_groups": [self._hyper_parameters(group) for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ConfigError(
                f"the state has {len(groups)} parameter groups but this optimizer has {len(self.param_groups)}"
            )
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: tuple(v) if key == "betas" else v for key, v in loaded.items()})

    def hyper(self, group: int, step: int, grad_scale: float) -> Hyper:
        """Numbers for update number `step` of a parameter of `group`, as they stand now."""
        values = self.param_groups[group]
        beta1, beta2 = values["betas"]
        return Hyper(
            lr=float(values["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(values["eps"]),
            weight_decay=float(values["weight_decay"]),
            step=step,
            decoupled=bool(values["decoupled"]),
            grad_scale=grad_scale,
        )

    @staticmethod
    def _hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key != "params"}


def defaults_from_config(type_name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a configuration's optimizer section, under our names.

    As in DeepSpeed, `Adam` decays weights in AdamW's way unless `adam_w_mode` is false.

    Raises:
        ConfigError: an optimizer that is not built.
    """
    kind = type_name.lower()
    if kind not in ("adam", "adamw"):
        raise ConfigError(f"optimizer.type is {type_name!r}; choose Adam or AdamW")
    values = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    values["decoupled"] = kind == "adamw" or bool(params.get("adam_w_mode", True))
    return values


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Parameter groups of a torch optimizer that the user built, under our names.

    Raises:
        ConfigError: an optimizer that is not Adam or AdamW, or uses an option that has no counterpart here.
    """
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        raise ConfigError(
            f"optimizer {type(optimizer).__name__} cannot be tiered; pass torch.optim.Adam or AdamW, "
            "or name one in the configuration"
        )
    groups = []
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise ConfigError(f"optimizer option {option}=True is not supported; set it to False")
        kept = {key: group[key] for key in ("params", "lr", "betas", "eps", "weight_decay")}
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
        groups.append({**kept, "decoupled": decoupled})
    return groups
