"""The optimizer that DeepSpeed's optimizer wraps: `engine.optimizer.optimizer`.

Its class shows which optimizer trains. Its parameter groups are the engine's. It updates nothing, and its states are
read from the tiers on access.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity.config import Config
from infinity.integrations.deepspeed import named_optimizers as named
from infinity.optim.optimizer import check_no_states


class LiveStates(defaultdict[torch.Tensor, Any]):
    """A mapping of optimizer states that stores nothing: each access reads the states of a parameter from the tiers.

    Args:
        steps: returns the number of updates so far.
        moments: returns the moments of a parameter, or of a flat tensor of masters, by name.
    """

    def __init__(self, steps: Callable[[], int], moments: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]) -> None:
        super().__init__()
        self._steps, self._moments = steps, moments

    def __missing__(self, of: torch.Tensor) -> dict[str, Any]:
        return {"step": self._steps(), **self._moments(of)}

    def __contains__(self, of: object) -> bool:
        return isinstance(of, torch.Tensor) and self._steps() > 0 and bool(self._moments(of))

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has no engine, and no states
        return defaultdict, (dict,)


def base_optimizer(config: Config, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """Return an optimizer of DeepSpeed's class for this configuration, with these groups; None if it names none."""
    if config.optimizer is None:
        return None
    name, params = config.optimizer.type.lower(), config.optimizer.params
    offloaded = config.zero.offload_optimizer.device != "none"
    given = [param for group in groups for param in group["params"]]
    made: torch.optim.Optimizer
    if name in ("adam", "adamw"):
        torchs, decoupled = bool(params.get("torch_adam")), bool(groups[0]["decoupled"])
        made = _adam(given, decoupled=decoupled, torchs=torchs, host=offloaded)
    elif name == "lion":
        made = (named.DeepSpeedCPULion if offloaded else named.FusedLion)(given)
    elif name == "adagrad":
        made = named.DeepSpeedCPUAdagrad(given) if offloaded else torch.optim.Adagrad(given)
    else:
        made = torch.optim.SGD(given)
    made.state.clear()
    made.param_groups = groups
    made.register_load_state_dict_pre_hook(lambda optimizer, state_dict: check_no_states(state_dict))
    return made


def _adam(given: list[torch.nn.Parameter], *, decoupled: bool, torchs: bool, host: bool) -> torch.optim.Optimizer:
    if torchs:
        return torch.optim.AdamW(given) if decoupled else torch.optim.Adam(given)
    if host:
        return named.DeepSpeedCPUAdam(given, adamw_mode=decoupled)
    return named.FusedAdam(given, adam_w_mode=decoupled)
