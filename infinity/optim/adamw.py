"""AdamW and Adam for plain training loops, with their states in host memory or on NVMe.

optimizer = infinity.optim.AdamW(model.parameters(), lr=3e-4, offload="nvme", nvme_path="/local_nvme")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from infinity.errors import ConfigError
from infinity.optim.home import StatesHome
from infinity.optim.kinds import ADAM

# The formats that fit parameters of a dtype; the first is the default, and exact.
_FORMATS_OF = {torch.float32: ("fp32",), torch.bfloat16: ("split", "bf16", "int8"), torch.float16: ("master",)}
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")
_Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, computed on the CPU with its states in host memory or on NVMe.

    Parameters may be on the CPU or a GPU, in float32, bfloat16 or float16; the 16-bit types get an exact float32
    master. `state_dict` is compatible with torch's: it has float32 moments, and `master` for 16-bit parameters. Close
    the optimizer after use, or use it as a context manager. Its files are removed at exit in any case.

    Args:
        params: as for any torch optimizer; learning-rate schedulers may change the groups.
        offload: "cpu" or "nvme".
        nvme_path: directory on the drive, for "nvme".
        state_format: "auto" (exact), or for bfloat16 parameters "bf16" or "int8", which are smaller; see
            docs/how-to/choose-a-state-format.md.

    Raises:
        ConfigError: options that contradict each other.
        StorageError: `nvme_path` cannot be used or has too little space.
    """

    decoupled = True

    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        offload: str = "cpu",
        nvme_path: str | Path | None = None,
        state_format: str = "auto",
    ) -> None:
        _check_numbers(float(lr), betas, eps, weight_decay)
        if offload not in ("cpu", "nvme"):
            raise ConfigError(f"offload is {offload!r}; choose 'cpu' or 'nvme'")
        if (offload == "nvme") != (nvme_path is not None):
            raise ConfigError("offload='nvme' needs nvme_path, a directory on the drive, and only that")
        self._nvme_path = Path(nvme_path) if nvme_path is not None else None
        self._state_format = state_format
        self._placed: dict[torch.Tensor, tuple[StatesHome, int]] = {}
        self._steps: dict[torch.Tensor, int] = {}
        self._started: set[torch.Tensor] = set()  # updated by a hook since the last step()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._adopt([parameter for group in self.param_groups for parameter in group["params"]])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._placed:  # after the constructor has added its groups
            self._adopt(self.param_groups[-1]["params"])

    def close(self) -> None:
        """Finish queued updates and free the states."""
        for home in self._each_home():
            home.close()
        self._placed.clear()

    @property
    def has_stepped(self) -> bool:
        """Whether a parameter was updated, or the states of an earlier run were loaded."""
        return bool(self._steps)

    def __enter__(self) -> AdamW:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Updates #

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and block until all updates have ended."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self._started:
                    self._start_update(parameter, group)
        self._wait()
        self._started.clear()
        return loss

    def overlap(self, model: nn.Module) -> list[RemovableHandle]:
        """Start each update inside backward, as soon as its gradient is final; `step()` waits for the updates.

        Use this only in loops that call backward once per step and do not clip or scale gradients, because an update
        uses the gradient as it is when the update starts.

        Returns:
            Handles; `remove()` of each ends this for one parameter.
        """
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}

        def start(parameter: torch.Tensor) -> None:
            if parameter in self._started:
                raise ConfigError("a second backward pass before step(): overlap() serves one pass a step")
            self._start_update(parameter, groups[parameter])
            self._started.add(parameter)

        owned = [parameter for parameter in model.parameters() if parameter in groups and parameter.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(start) for parameter in owned]

    def _start_update(self, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
        gradient = cast(torch.Tensor, parameter.grad)
        if gradient.is_sparse:
            raise ConfigError("a gradient is sparse; give this parameter another optimizer")
        step = self._steps.get(parameter, 0) + 1
        home, unit = self._placed[parameter]
        hyper = ADAM.rule({**group, "decoupled": self.decoupled}, step, 1.0)
        home.start_update(unit, parameter, gradient, hyper)
        self._steps[parameter] = step

    def _wait(self) -> None:
        for home in self._each_home():
            home.wait()

    # States #

    def state_dict(self) -> dict[str, Any]:
        """Return the state of torch's AdamW: `step`, `exp_avg` and `exp_avg_sq` by parameter, in host memory."""
        self._wait()
        packed = super().state_dict()
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        packed["state"] = {}
        for index, parameter in enumerate(ordered):
            if parameter not in self._steps:
                continue  # never updated; torch also leaves it out
            home, unit = self._placed[parameter]
            values = {name: flat.view(parameter.shape) for name, flat in home.read(unit, parameter).items()}
            step = torch.tensor(float(self._steps[parameter]), dtype=torch.float32, device="cpu")
            packed["state"][index] = {"step": step, **values}
        return packed

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this class or of torch's.

        Raises:
            ConfigError: it needs an option that is not supported.
        """
        for group in state_dict["param_groups"]:
            for option in _UNSUPPORTED:
                if group.get(option):
                    raise ConfigError(f"the saved optimizer used {option}=True, which is not supported here")
        self._wait()
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        self._steps.clear()
        for saved_id, parameter in zip(saved_ids, ordered, strict=True):
            values = dict(state_dict["state"].get(saved_id, {}))
            home, unit = self._placed[parameter]
            if values:
                self._steps[parameter] = int(values.pop("step"))
            home.write(unit, parameter, values)

    def _adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """Allocate the states of parameters, one home for each dtype."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.dtype not in _FORMATS_OF:
                raise ConfigError(f"a parameter is {parameter.dtype}; use float32, bfloat16 or float16")
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            name = _FORMATS_OF[dtype][0] if self._state_format == "auto" else self._state_format
            if name not in _FORMATS_OF[dtype]:
                raise ConfigError(f"state_format {self._state_format!r} does not fit {dtype} parameters; use 'auto'")
            home = StatesHome(members, name, self._nvme_path)
            self._placed.update((parameter, (home, unit)) for unit, parameter in enumerate(members))

    def _each_home(self) -> list[StatesHome]:
        return list(dict.fromkeys(home for home, _ in self._placed.values()))


class Adam(AdamW):
    """`AdamW` with the weight decay of Adam, which is added to the gradient. Arguments are those of `AdamW`."""

    decoupled = False

    def __init__(
        self,
        params: _Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **where: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **where)


def _check_numbers(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value, legal in (
        ("learning rate", lr, lr >= 0),
        ("epsilon value", eps, eps >= 0),
        ("beta parameter at index 0", betas[0], 0 <= betas[0] < 1),
        ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
        ("weight_decay value", weight_decay, weight_decay >= 0),
    ):
        if not legal:
            raise ConfigError(f"Invalid {name}: {value}")  # torch's text, which callers may match
