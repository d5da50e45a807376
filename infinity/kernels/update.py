"""The optimizer's update on flat host tensors, for every format of parameters and moments.

Every function takes 1-D contiguous CPU tensors of one length and works in place. Results have the same bits for every
instruction set, number of threads, and division of a tensor into pieces.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import torch

from infinity.kernels._native import DTYPES, _adam, check
from infinity.kernels.rules import Loop, Rule

_MOST_POSITIONS = 1 << 32  # the kernels count them in 32 bits
SCALE_BLOCK: int = _adam.SCALE_BLOCK  # elements that share the scale of an 8-bit moment

_MOMENT_KINDS = {
    torch.float32: _adam.MomentKind.f32,
    torch.bfloat16: _adam.MomentKind.bf16,
    torch.uint8: _adam.MomentKind.int8,
}
_LOOPS = {
    Loop.ADAMW: _adam.Rule.adamw,
    Loop.ADAM: _adam.Rule.adam,
    Loop.ADAGRAD: _adam.Rule.adagrad,
    Loop.LION: _adam.Rule.lion,
    Loop.SGD: _adam.Rule.sgd,
}
# dtype of the parameter -> dtype of its master or low bits, and the kernels' name of the pair
_PARAM_KINDS = {
    torch.float32: (None, _adam.ParamKind.f32),
    torch.bfloat16: (torch.int16, _adam.ParamKind.split),
    torch.float16: (torch.float32, _adam.ParamKind.master),
}


@dataclass(frozen=True)
class Moment:
    """One moment in its stored form.

    Attributes:
        values: float32; bfloat16, stochastically rounded; or uint8, codes of 8-bit floats.
        scales: float32, one for every `SCALE_BLOCK` codes; only with uint8.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Dither:
    """Source of the bits for stochastic rounding: a hash of both numbers.

    Attributes:
        seed: new for every step; 64 bits.
        index: position of the first element, so that a tensor may be updated in pieces.
    """

    seed: int = 0
    index: int = 0


@dataclass(frozen=True)
class Aside:
    """Further tensors that keep old or new values of an update, so that both exist after it; None to update in place.

    Attributes:
        param: gets the old values. The new ones are in place.
        master, first, second: get the new values. The old ones stay in place.
    """

    param: torch.Tensor | None = None
    master: torch.Tensor | None = None
    first: Moment | None = None
    second: Moment | None = None


@dataclass(frozen=True)
class Lost:
    """Elements of an update whose old values cannot be reconstructed from the states; positions are in order.

    Attributes:
        grads: positions of gradients; None if there are too many.
        params: positions of parameters.
        param_bits: the old 16-bit patterns of these parameters.
    """

    grads: list[int] | None
    params: list[int]
    param_bits: list[int]


def update(
    hyper: Rule,
    param: torch.Tensor,
    grad: torch.Tensor,
    *,
    master: torch.Tensor | None = None,
    first: Moment | None = None,
    second: Moment | None = None,
    dither: Dither | None = None,
    aside: Aside | None = None,
    report_lost: bool = False,
    params: bool = False,
) -> Lost | None:
    """Make one update by any rule.

    Args:
        param: float32, which is its own master; bfloat16 with int16 low bits; float16 with a float32 master.
        grad: float32, bfloat16 or float16.
        master: the low bits or the master of `param`.
        first, second: the moments of the rule, of one kind.
        aside: further tensors that keep old or new values.
        report_lost: report the gradients that `reconstruct_grad` cannot reconstruct; requires `can_reconstruct`.
        params: also report the parameters that `reconstruct_params` cannot reconstruct.

    Returns:
        The elements that cannot be reconstructed, if requested.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = param.numel()
    check(numel, {"param": param}, *_PARAM_KINDS)
    check(numel, {"grad": grad}, *DTYPES)
    if report_lost and numel > _MOST_POSITIONS:
        raise ValueError(f"param has {numel} elements; gradients of at most {_MOST_POSITIONS} can be reconstructed")
    if report_lost and not can_reconstruct(hyper, None if first is None else first.values.dtype, grad.dtype):
        raise ValueError(f"gradients of dtype {grad.dtype} cannot be reconstructed after {type(hyper).__name__}")
    if params and not (report_lost and param.dtype == torch.bfloat16):
        raise ValueError(f"params of dtype {param.dtype} cannot be reconstructed after this update")
    param_kind = _param_kind(param, master)
    moment_kind = _moment_kind(hyper, first, second, numel)
    if aside is not None:
        _check_aside("param", aside.param, param)
        _check_aside("master", aside.master, master)
        _check_moment_aside("first", aside.first, first)
        _check_moment_aside("second", aside.second, second)
    rule, scalars = _native(hyper)
    dither = dither or Dither()
    lost = _adam.update(
        rule=rule,
        param_kind=param_kind,
        moment_kind=moment_kind,
        n=numel,
        param=param.data_ptr(),
        master=_address(master),
        **_addresses(first, second),
        grad=grad.data_ptr(),
        grad_dtype=DTYPES[grad.dtype],
        scalars=scalars,
        seed=dither.seed,
        index=dither.index,
        aside=None if aside is None else _native_aside(aside),
        report_lost=report_lost,
        params=params,
    )
    return None if lost is None else Lost(*lost)


def can_reconstruct(hyper: Rule, first_dtype: torch.dtype | None, grad_dtype: torch.dtype) -> bool:
    """Whether almost all gradients of an update can be reconstructed from its first moment of this dtype.

    This holds for AdamW (and for Adam without decay) with exact moments and gradients of 16 bits.
    """
    exact = first_dtype is torch.float32 and grad_dtype in (torch.bfloat16, torch.float16)
    return exact and hyper.loop()[0] is Loop.ADAMW


def reconstruct_grad(hyper: Rule, before: torch.Tensor, after: torch.Tensor, grad: torch.Tensor) -> None:
    """Reconstruct the gradients of an update, except the ones that `update` has reported.

    Args:
        hyper: the rule of that update, for which `can_reconstruct` is True.
        before, after: its first moment, float32.
        grad: filled; bfloat16 or float16.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = grad.numel()
    check(numel, {"grad": grad}, torch.bfloat16, torch.float16)
    check(numel, {"before": before, "after": after}, torch.float32)
    _, scalars = _native(hyper)
    _adam.reconstruct_grads(numel, before.data_ptr(), after.data_ptr(), scalars, DTYPES[grad.dtype], grad.data_ptr())


def reconstruct_params(
    hyper: Rule,
    param: torch.Tensor,
    low_bits: tuple[torch.Tensor, torch.Tensor],
    first: torch.Tensor,
    second: torch.Tensor,
) -> None:
    """Reconstruct the parameters before an update in place, except the ones that `update` has reported.

    Args:
        hyper: the rule of that update, for which `can_reconstruct` is True.
        param: bfloat16, after the update.
        low_bits: its low bits, before and after the update; int16.
        first, second: the moments after it; float32.

    Raises:
        ValueError: a tensor has the wrong dtype, length, layout or device; the message names it.
    """
    numel = param.numel()
    before, after = low_bits
    check(numel, {"param": param}, torch.bfloat16)
    check(numel, {"low bits before": before, "low bits after": after}, torch.int16)
    check(numel, {"first": first, "second": second}, torch.float32)
    _, scalars = _native(hyper)
    states = (before.data_ptr(), after.data_ptr(), first.data_ptr(), second.data_ptr())
    _adam.reconstruct_params(numel, param.data_ptr(), *states, scalars)


def _param_kind(param: torch.Tensor, master: torch.Tensor | None) -> _adam.ParamKind:
    """Return the kernels' name of a parameter with this master. Raise ValueError if the master does not fit it."""
    master_dtype, kind = _PARAM_KINDS[param.dtype]
    if (master is None) != (master_dtype is None):
        raise ValueError(f"master is {'missing' if master is None else 'given'} for a {param.dtype} param")
    if master is not None and master_dtype is not None:
        check(param.numel(), {"master": master}, master_dtype)
    return kind


def _moment_kind(hyper: Rule, first: Moment | None, second: Moment | None, numel: int) -> _adam.MomentKind:
    """Return the kernels' name of these moments. Raise ValueError unless they are the rule's, and of one kind."""
    if (first is None) != (hyper.first is None) or (second is None) != (hyper.second is None):
        raise ValueError(f"{type(hyper).__name__} has the moments {hyper.first} and {hyper.second}; give just these")
    moments = {hyper.first: first, hyper.second: second}
    kinds = {_check_moment(str(name), moment, numel) for name, moment in moments.items() if moment is not None}
    if len(kinds) != 1:
        raise ValueError(f"{hyper.first} and {hyper.second} are of different kinds")
    return kinds.pop()


def _check_aside(name: str, aside: torch.Tensor | None, own: torch.Tensor | None) -> None:
    if aside is None:
        return
    if own is None:
        raise ValueError(f"the update has no {name}, but one is given aside")
    check(own.numel(), {f"{name} aside": aside}, own.dtype)


def _check_moment_aside(name: str, aside: Moment | None, own: Moment | None) -> None:
    if aside is None:
        return
    if own is None:
        raise ValueError(f"the update has no {name} moment, but one is given aside")
    _check_aside(f"{name} moment", aside.values, own.values)
    _check_aside(f"scales of the {name} moment", aside.scales, own.scales)
    if (aside.scales is None) != (own.scales is None):
        raise ValueError(f"the {name} moment has scales, but the one aside has none")


def _native_aside(aside: Aside) -> _adam.Aside:
    return _adam.Aside(
        param=_address(aside.param), master=_address(aside.master), **_addresses(aside.first, aside.second)
    )


@lru_cache(maxsize=64)
def _native(rule: Rule) -> tuple[_adam.Rule, _adam.Scalars]:
    """Convert a rule for the kernels. Cached, because all tiles of a step use the same rules."""
    loop, numbers = rule.loop()
    return _LOOPS[loop], _adam.Scalars(**asdict(numbers))


def load_moment(moment: Moment, *, signed: bool) -> torch.Tensor:
    """Return a moment as a new float32 tensor.

    Args:
        signed: whether it is a rule's `first` moment.
    """
    numel = moment.values.numel()
    kind = _check_moment("moment", moment, numel)
    out = torch.empty(numel, dtype=torch.float32, device="cpu")
    _adam.load_moment(kind, signed, numel, moment.values.data_ptr(), _address(moment.scales), out.data_ptr())
    return out


def store_moment(moment: Moment, values: torch.Tensor, *, signed: bool, dither: Dither | None = None) -> None:
    """Store float32 `values` in the format of `moment`; the inverse of `load_moment`, except for rounding."""
    numel = values.numel()
    check(numel, {"values": values}, torch.float32)
    kind = _check_moment("moment", moment, numel)
    dither = dither or Dither()
    target = (moment.values.data_ptr(), _address(moment.scales))
    _adam.store_moment(kind, signed, numel, *target, values.data_ptr(), dither.seed, dither.index)


def bare_loop(param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor) -> None:
    """Read and write the bytes of Adam in fp32 with almost no arithmetic: its roofline. Finite values do not change."""
    numel = param.numel()
    check(numel, {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}, torch.float32)
    _adam.bare_loop(numel, param.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr())


def _check_moment(name: str, moment: Moment, numel: int) -> _adam.MomentKind:
    check(numel, {name: moment.values}, *_MOMENT_KINDS)
    if (moment.scales is None) == (moment.values.dtype == torch.uint8):
        raise ValueError(f"{name} is {moment.values.dtype}: scales are needed with torch.uint8, and only with it")
    if moment.scales is not None:
        check(-(-numel // SCALE_BLOCK), {f"scales of {name}": moment.scales}, torch.float32)
    return _MOMENT_KINDS[moment.values.dtype]


def _addresses(first: Moment | None, second: Moment | None) -> dict[str, int]:
    """Return the addresses of the moments, by the names of the kernels' arguments."""
    return {
        "first": _address(first.values if first else None),
        "first_scales": _address(first.scales if first else None),
        "second": _address(second.values if second else None),
        "second_scales": _address(second.scales if second else None),
    }


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
