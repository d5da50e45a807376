"""Updates of plain torch parameters without an engine: the kernels' rules, with moments in float32.

[Note: parameters of 16 bits without a master]
A parameter is read as float32, updated, and rounded to nearest. Updates smaller than half of its last bit are lost.
Moments should not have 16 bits either: in bfloat16, `exp_avg_sq * 0.999` is rounded to `exp_avg_sq`, so that the
average never decays. `infinity.optim.AdamW` keeps exact masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch

from infinity.errors import ConfigError
from infinity.kernels import AdagradHyper, LionHyper, Moment, Rule, update, update_in_torch

Group = Mapping[str, Any]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REFUSED = ("amsgrad", "differentiable")
_ELEMENTS = 1 << 22  # elements per piece if a float32 copy is made


class PlainOptimizer(torch.optim.Optimizer):
    """An optimizer that updates by the kernels' rules. Subclasses name it before torch's class, if there is one.

    Attributes:
        _rule: returns the rule of an update for (values of a group, step, gradient scale).
    """

    _rule: ClassVar[staticmethod[[Group, int, float], Rule]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. This is not called if an engine trains the parameters.

        Raises:
            ConfigError: a parameter, its gradient or an option of its group is not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _step_group(self, group: Group) -> None:
        for option in _REFUSED:
            if group.get(option):
                raise ConfigError(f"{type(self).__name__}: {option}={group[option]} is not supported; leave it out")
        sign = -1.0 if group.get("maximize") else 1.0
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            _check(type(self).__name__, parameter)
            state = self.state[parameter]
            step = int(state.get("step", 0)) + 1
            rule = self._rule(group, step, sign)
            for name in (rule.first, rule.second):
                if name is not None and name not in state:
                    dtype = self._moment_dtype(parameter)
                    state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            _update(rule, parameter, state)
            state["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a `state_dict` of this class, or of another implementation of the same optimizer."""
        super().load_state_dict(dict(state_dict))
        saved_ids = [saved for group in state_dict["param_groups"] for saved in group["params"]]
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        for saved_id, parameter in zip(saved_ids, ordered, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                if name != "step" and isinstance(value, torch.Tensor):  # torch has rounded it to the parameter's dtype
                    kept = torch.empty(parameter.shape, dtype=self._moment_dtype(parameter), device=parameter.device)
                    self.state[parameter][name] = kept.copy_(value)

    def _moment_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if self.defaults["fp32_optimizer_states"] else parameter.dtype


def betas_of(group: Group) -> tuple[float, float]:
    """Return the decay factors of a group's moments. Raise ValueError if a moment would not decay."""
    beta1, beta2 = map(float, group["betas"])
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):  # nor if one is NaN
        raise ValueError(f"betas are ({beta1}, {beta2}); each must be at least 0 and less than 1")
    return beta1, beta2


def lion_rule(group: Group, step: int, grad_scale: float) -> Rule:
    return LionHyper(float(group["lr"]), *betas_of(group), float(group["weight_decay"]), step, grad_scale)


class Lion(PlainOptimizer):
    """Lion.

    Args:
        fp32_optimizer_states: whether the moment of 16-bit parameters is float32; else it has the parameters' dtype.
    """

    _rule = staticmethod(lion_rule)

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})
        self.defaults["fp32_optimizer_states"] = fp32_optimizer_states


def _check(name: str, parameter: torch.Tensor) -> None:
    if parameter.dtype not in _DTYPES:
        raise ConfigError(f"{name}: a parameter is {parameter.dtype}; use float32, bfloat16 or float16")
    if type(parameter.data) is not torch.Tensor or parameter.is_meta:
        kind = "on the meta device" if parameter.is_meta else f"a {type(parameter.data).__name__}"
        raise ConfigError(f"{name}: a parameter is {kind}; it updates plain tensors, so use torch's optimizer for it")


def _update(rule: Rule, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
    grad = parameter.grad
    assert grad is not None
    values = parameter.detach()
    moments = {name: state[name] for name in (rule.first, rule.second) if name is not None}
    if not grad.is_sparse:
        _update_dense(rule, values, grad, moments)
        return
    if not isinstance(rule, AdagradHyper) or rule.weight_decay or grad.sparse_dim() != 1:
        raise ConfigError(
            "a gradient is sparse: only Adagrad without weight decay supports this, and only for rows of a tensor; use "
            "an embedding with sparse=False, or give this parameter another optimizer"
        )
    grad = grad.coalesce()
    rows = grad.indices()[0]
    beside = {name: moment[rows] for name, moment in moments.items()}
    chosen = values[rows]
    _update_dense(rule, chosen, grad.values(), beside)
    values[rows] = chosen
    for name, moment in moments.items():
        moment[rows] = beside[name]


def _update_dense(rule: Rule, values: torch.Tensor, grad: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
    """Make one update in place, for tensors of one shape and any strides."""
    kept = [values, *moments.values()]
    flats = [tensor.contiguous().view(-1) for tensor in kept]  # no copies, if they are contiguous
    gradient = grad.detach().contiguous().view(-1)
    for start in range(0, values.numel(), _ELEMENTS):
        pieces = [flat[start : start + _ELEMENTS] for flat in flats]
        wide = [piece.float() for piece in pieces]  # no copies, if they are float32
        beside = dict(zip(moments, wide[1:], strict=True))
        _run(rule, wide[0], gradient[start : start + _ELEMENTS], beside)
        for piece, result in zip(pieces, wide, strict=True):
            if piece.dtype != result.dtype:
                piece.copy_(result)
    for tensor, flat in zip(kept, flats, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def _run(rule: Rule, values: torch.Tensor, grad: torch.Tensor, moments: Mapping[str, torch.Tensor]) -> None:
    first, second = (None if name is None else moments[name] for name in (rule.first, rule.second))
    grad = grad if grad.dtype in _DTYPES else grad.float()
    if values.is_cpu:
        as_moments = [None if moment is None else Moment(moment) for moment in (first, second)]
        update(rule, values, grad, first=as_moments[0], second=as_moments[1])
    else:
        update_in_torch(rule, values, grad, master=None, first=first, second=second)
