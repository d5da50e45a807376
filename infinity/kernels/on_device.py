"""Update states and measure gradients on a device, by one Triton kernel if possible, otherwise by torch's operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import torch

from infinity.errors import InfinityError
from infinity.kernels.rules import AdagradHyper, Hyper, LionHyper, Loop, Rule, SgdHyper
from infinity.kernels.torch_ops import update_in_torch
from infinity.kernels.update import Moment, update

_log = logging.getLogger(__name__)

_COMPILED_FOR = ("cuda", "xpu")  # includes ROCm, whose devices are cuda's
_TRIED = 4099
_PIECE = 1 << 24  # values per piece for the norm: their float64 copy takes 128 MiB
_LARGE = 1 << 25  # values from which one kernel saves the device more time than its launches cost the host

_Form = tuple[torch.dtype, torch.dtype | None, torch.dtype]  # dtypes of parameter, master and gradient


class Update(Protocol):
    """Signature of `update_in_torch`."""

    def __call__(
        self,
        rule: Rule,
        param: torch.Tensor,
        grad: torch.Tensor,
        *,
        master: torch.Tensor | None,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
    ) -> None: ...


def update_on_device(
    rule: Rule,
    param: torch.Tensor,
    grad: torch.Tensor,
    *,
    master: torch.Tensor | None,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
) -> None:
    """Make one update, as `update_in_torch`, by the fastest implementation with the bits of the host's kernels.

    Raises:
        InfinityError: no implementation has these bits on this device. Checked before the first update of its kind.
    """
    form = param.dtype, None if master is None else master.dtype, grad.dtype
    with _current(param.device):
        run = _serving(param.device, rule.loop()[0], form)
        run(rule, param, grad, master=master, first=first, second=second)


def norm_on_device(values: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm of `values` as a float64 scalar on their device; NaN or infinite if a value is."""
    if values.numel() < _LARGE:
        return norm_in_torch(values)
    with _current(values.device):
        return _norm_serving(values.device, values.dtype)(values)


def norm_in_torch(values: torch.Tensor) -> torch.Tensor:
    """As `norm_on_device`, in pieces of `_PIECE` elements, because torch makes a float64 copy of its input."""
    pieces = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in values.flatten().split(_PIECE)]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(pieces)) if len(pieces) > 1 else pieces[0]
    return norm


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the thread's current one: Triton launches kernels there, not on the device of their tensors."""
    if device.type not in _COMPILED_FOR:
        return nullcontext()
    return torch.get_device_module(device).device(device)  # type: ignore[no-any-return]


@cache
def _serving(device: torch.device, loop: Loop, form: _Form) -> Update:
    """Return the fastest implementation with the bits of the host's kernels.

    This is Triton's kernel if it can be compiled, otherwise torch's operators, which read and write about ten times as
    many bytes.

    Raises:
        InfinityError: neither has these bits.
    """
    kernel, problem = _compiled("update_in_triton", device, lambda run: agrees(run, device, loop, form), "bits")
    if kernel is not None:
        return kernel  # type: ignore[no-any-return]
    if not agrees(update_in_torch, device, loop, form):
        raise InfinityError(
            f"states cannot stay on {device}: torch's operators give {loop.name} updates of {form[0]} parameters other "
            f"bits there than the host's kernels do (and Triton cannot: {problem}); "
            'set zero_optimization.offload_optimizer.device to "cpu" and tiering.fill_device to false'
        )
    if device.type in _COMPILED_FOR:
        _log.warning("%s updates on %s are made by torch's operators, which is slower: %s", loop.name, device, problem)
    return update_in_torch


@cache
def _norm_serving(device: torch.device, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return Triton's kernel if it can be compiled and is right, otherwise torch's operators.

    The operators read and write nine times as many bytes of bfloat16 values.
    """
    kernel, problem = _compiled("norm_in_triton", device, lambda norm: measures(norm, device, dtype), "values")
    if kernel is not None:
        return kernel  # type: ignore[no-any-return]
    if device.type in _COMPILED_FOR:
        _log.warning(
            "norms of %s on %s are made by torch's operators, which is slower: Triton: %s", dtype, device, problem
        )
    return norm_in_torch


def _compiled(name: str, device: torch.device, is_right: Callable[[Any], bool], what: str) -> tuple[Any, str]:
    """Return (Triton's function of this name, ""), or (None, why it cannot be used on the device).

    Args:
        is_right: returns whether the function gives right results on the device.
        what: what is wrong otherwise, for the message.
    """
    if device.type not in _COMPILED_FOR:
        return None, f"it compiles nothing for {device.type}"
    try:
        kernel = getattr(import_module("infinity.kernels.triton_ops"), name)
        return (kernel, "") if is_right(kernel) else (None, f"its kernel has other {what}")
    except Exception as error:  # no Triton, no compiler, no memory: torch's operators remain
        return None, str(error)


def measures(norm: Callable[[torch.Tensor], torch.Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `norm` on this device equals the host's, for values of any magnitude, and for infinite values and NaN."""
    for worst in (0.0, torch.inf, torch.nan):
        values = _extreme_values(5).to(dtype).nan_to_num(0.0, 0.0, 0.0)
        values[77] = worst
        there = norm(values.to(device)).cpu()
        if not torch.isclose(there, values.double().norm(), rtol=1e-12, atol=0.0, equal_nan=True):
            return False
    return True


def agrees(run: Update, device: torch.device, loop: Loop, form: _Form) -> bool:
    """Whether an update on this device gives the bits of the host's kernels, for values of any magnitude."""
    dtype, master_dtype, grad_dtype = form
    grad = _extreme_values(1).to(grad_dtype)
    for rule in _rules(loop):
        param = _extreme_values(4).to(dtype)
        master = None if master_dtype is None else _extreme_master(master_dtype)
        param[::9] = 1.0  # changed outside the optimizer
        first = None if rule.first is None else _extreme_values(2)
        second = None if rule.second is None else _extreme_values(3).abs()
        here = (param, master, first, second)
        there = [None if each is None else each.to(device, copy=True) for each in here]
        moments = [None if each is None else Moment(each) for each in (first, second)]
        update(rule, param, grad, master=master, first=moments[0], second=moments[1])
        assert there[0] is not None
        run(rule, there[0], grad.to(device), master=there[1], first=there[2], second=there[3])
        for left, right in zip(here, there, strict=True):
            if left is not None and right is not None and not _same(left, right.cpu(), ~param.isnan()):
                return False
    return True


def _rules(loop: Loop) -> Iterator[Rule]:
    """Return rules with this loop, one for each path through it."""
    rules: tuple[Rule, ...] = (
        Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=True, grad_scale=0.37),
        Hyper(1e-3, 0.3, 0.95, 1e-8, 0.1, 3, decoupled=True),
        Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 3, decoupled=False),
        Hyper(1e-3, 0.3, 0.95, 1e-8, 0.1, 3, decoupled=False, grad_scale=0.37),
        AdagradHyper(1e-2, 1e-3, 1e-10, 0.1, 3),
        LionHyper(1e-3, 0.9, 0.99, 0.1, 3),
        SgdHyper(1e-2, 0.9, 0.1, 3),
        SgdHyper(1e-2, 0.9, 0.1, 3, nesterov=True),
    )
    return (rule for rule in rules if rule.loop()[0] is loop)


def _extreme_values(seed: int) -> torch.Tensor:
    """Return finite values of every magnitude, including denormal ones and zeros of both signs."""
    drawn = torch.Generator().manual_seed(seed)
    magnitude = torch.empty(_TRIED, device="cpu").uniform_(-44, 18, generator=drawn)
    values = torch.randn(_TRIED, generator=drawn, device="cpu") * 10.0**magnitude
    values[seed::97] = 0.0
    values[seed + 1 :: 97] = -0.0
    return values


def _extreme_master(dtype: torch.dtype) -> torch.Tensor:
    values = _extreme_values(4)
    return values.view(torch.int16)[::2].contiguous() if dtype == torch.int16 else values


def _same(left: torch.Tensor, right: torch.Tensor, known: torch.Tensor) -> bool:
    """Whether the bits are equal where `known` is True, except the payload of NaN."""
    if left.is_floating_point():
        if not torch.equal(left.isnan(), right.isnan()):
            return False
        known = known & ~left.isnan()
    left, right = left[known], right[known]
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
