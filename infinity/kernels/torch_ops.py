"""The optimizer's update in torch's operators, for states on any device.

The second implementation of one specification: every function gives the bits of the native kernels, so that a tile may
be updated where it is. Operators that a backend may contract to a fused multiply-add (`add` with `alpha`, `addcmul`,
`lerp`) would round once where the kernels round twice, and are not used; for the square root see `_sqrt`. The payload
of a NaN depends on the device.

Formats whose moments are rounded stochastically are only updated by the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from infinity.kernels.rules import Loop, Numbers, Rule

_ELEMENTS = 1 << 24  # elements per piece, which bounds the memory of intermediate results
_SCRATCH = 8 * torch.float32.itemsize  # the most bytes of these per element


def scratch_bytes(numel: int) -> int:
    """Return the most device memory that an update of `numel` elements uses for intermediate results."""
    return min(numel, _ELEMENTS) * _SCRATCH


def update_in_torch(
    rule: Rule,
    param: torch.Tensor,
    grad: torch.Tensor,
    *,
    master: torch.Tensor | None,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
) -> None:
    """Make one update in place, on the current stream.

    Args:
        param: 1-D; float32, which is its own master; bfloat16 with int16 low bits; float16 with a float32 master.
        grad: float32, bfloat16 or float16; all tensors have the same length.
        master: the low bits or the master of `param`.
        first, second: the float32 moments of the rule.
    """
    loop, numbers = rule.loop()
    run = _LOOPS[loop]
    for start in range(0, param.numel(), _ELEMENTS):
        here = slice(start, start + _ELEMENTS)
        weight, beside = param[here], None if master is None else master[here]
        value = join(weight, beside)
        scaled = grad[here].float()
        if numbers.grad_scale != 1:  # saves a launch
            scaled = scaled * numbers.grad_scale
        run(value, None if first is None else first[here], None if second is None else second[here], scaled, numbers)
        split(value, weight, beside)


# Parameters #


def join(param: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 master: `param` or `master` itself if it is one, else a new tensor."""
    if master is None:
        return param
    if master.dtype == torch.int16:
        rounded = param.view(torch.int16).to(torch.int32) << 16
        bits = rounded + master
        return torch.where((bits & 0x7FFFFFFF) < 0x7FFF8000, bits, rounded).view(torch.float32)
    unchanged = _half_bits(master) == param.view(torch.int16)
    return torch.where(unchanged, master, param.float())


def split(value: torch.Tensor, param: torch.Tensor, master: torch.Tensor | None) -> None:
    """Store the updated result of `join`."""
    if master is None:
        return
    if master.dtype == torch.int16:
        bits = value.view(torch.int32)
        bits = torch.where(value.isnan(), (bits & -0x80000000) | 0x7FC00000, bits)
        # Not with `out=`: CUDA computes a shift in the type that it writes, which is int16 here.
        param.view(torch.int16).copy_((bits + 0x8000) >> 16)
        master.copy_(bits)
        return
    master.copy_(value)
    param.view(torch.int16).copy_(_half_bits(value))


def _half_bits(value: torch.Tensor) -> torch.Tensor:
    """Return float16, rounded to nearest even, as int16; a NaN gets the bits that the kernels give it."""
    sign = (value.view(torch.int32) >> 16) & 0x8000
    return torch.where(value.isnan(), (sign | 0x7E00).to(torch.int16), value.half().view(torch.int16))


# The rules, in the order of operations of csrc/adam/kernels.cpp #

_State = torch.Tensor | None
_Run = Callable[[torch.Tensor, _State, _State, torch.Tensor, Numbers], None]


def _adam(coupled: bool) -> _Run:
    def run(p: torch.Tensor, m: _State, v: _State, g: torch.Tensor, n: Numbers) -> None:
        assert m is not None
        assert v is not None
        if coupled:
            g = g + p * n.l2
        else:
            p *= n.param_factor
        difference = g - m
        if n.m_weight < 0.5:  # torch's lerp starts from the nearer end
            m += difference * n.m_weight
        else:
            torch.add(g, difference * less(n.m_weight, 1.0), out=m)
        v *= n.v_factor
        v += (g * n.v_weight) * g
        denominator = _sqrt(v).mul_(n.inv_bias2).add_(n.eps)
        p += (m * n.step_size).div_(denominator)

    return run


def _adagrad(p: torch.Tensor, _: _State, s: _State, g: torch.Tensor, n: Numbers) -> None:
    assert s is not None
    g = g + p * n.l2
    s += g * g
    p += (g * n.step_size).div_(_sqrt(s).add_(n.eps))


def _lion(p: torch.Tensor, m: _State, _: _State, g: torch.Tensor, n: Numbers) -> None:
    assert m is not None
    direction = m * less(1.0, n.blend) + g * n.blend
    # torch's sign returns zero for NaN and for -0.
    sign = torch.where(direction > 0, 1.0, torch.where(direction < 0, -1.0, direction))
    p *= n.param_factor
    p += sign.mul_(n.step_size)
    m *= n.m_factor
    m += g * n.m_weight


def _sgd(p: torch.Tensor, m: _State, _: _State, g: torch.Tensor, n: Numbers) -> None:
    assert m is not None
    g = g + p * n.l2
    m *= n.m_factor
    m += g * n.m_weight
    direction = g + m * n.m_factor if n.blend else m
    p += direction * n.step_size


def _sqrt(value: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded root. torch's vector library on the CPU does not round it correctly; GPUs do."""
    return value.sqrt() if value.is_cuda else value.double().sqrt_().float()


def less(value: float, other: float) -> float:
    """Return `value - other` in float32, as in the kernels."""
    return float(np.float32(value) - np.float32(other))


_LOOPS: dict[Loop, _Run] = {
    Loop.ADAMW: _adam(coupled=False),
    Loop.ADAM: _adam(coupled=True),
    Loop.ADAGRAD: _adagrad,
    Loop.LION: _lion,
    Loop.SGD: _sgd,
}
