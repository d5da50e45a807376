"""The optimizer's update and the norm of gradients on a GPU, each in one Triton kernel, which reads and writes each
value once.

The third implementation of the specification in `torch_ops`, with the same bits: no multiplication is contracted with
an addition (`enable_fp_fusion`), and division and root are correctly rounded. `on_device` checks this for each GPU
before its first use. Import this only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from infinity.kernels.rules import Loop, Rule
from infinity.kernels.torch_ops import less

_BLOCK = 1024
_NORM_BLOCK = 4096
_OWN, _LOW_BITS, _BESIDE = 0, 1, 2  # the place of the float32 master
_ADAMW, _ADAM, _ADAGRAD, _LION, _SGD = range(5)
_LOOPS = {Loop.ADAMW: _ADAMW, Loop.ADAM: _ADAM, Loop.ADAGRAD: _ADAGRAD, Loop.LION: _LION, Loop.SGD: _SGD}


def update_in_triton(
    rule: Rule,
    param: torch.Tensor,
    grad: torch.Tensor,
    *,
    master: torch.Tensor | None,
    first: torch.Tensor | None,
    second: torch.Tensor | None,
) -> None:
    """Like `update_in_torch`."""
    if not param.numel():
        return
    loop, n = rule.loop()
    halves = grad.dtype == torch.bfloat16
    place = _OWN if master is None else _LOW_BITS if master.dtype == torch.int16 else _BESIDE
    _update[(triton.cdiv(param.numel(), _BLOCK),)](
        param if place == _OWN else param.view(torch.int16),
        grad.view(torch.int16) if halves else grad,
        master,
        first,
        second,
        param.numel(),
        n.grad_scale,
        n.step_size,
        n.param_factor,
        n.l2,
        n.m_factor,
        n.m_weight,
        less(n.m_weight, 1.0),
        n.v_factor,
        n.v_weight,
        n.blend,
        less(1.0, n.blend),
        n.inv_bias2,
        n.eps,
        LOOP=_LOOPS[loop],
        MASTER=place,
        HALVES=halves,
        STARTS_NEAR=n.m_weight < 0.5,
        NESTEROV=bool(n.blend),
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


@triton.jit
def _update(
    param,
    grad,
    master,
    first,
    second,
    numel,
    grad_scale,
    step_size,
    param_factor,
    l2,
    m_factor,
    m_weight,
    m_weight_less_1,
    v_factor,
    v_weight,
    blend,
    one_less_blend,
    inv_bias2,
    eps,
    LOOP: tl.constexpr,
    MASTER: tl.constexpr,
    HALVES: tl.constexpr,
    STARTS_NEAR: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    if HALVES:  # bfloat16 is the upper half of float32
        g = (tl.load(grad + at, here, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        g = tl.load(grad + at, here, 0.0).to(tl.float32)
    g = g * grad_scale

    # Join the master, see `join` in torch_ops.
    if MASTER == 0:
        p = tl.load(param + at, here, 0.0)
    elif MASTER == 1:
        rounded = tl.load(param + at, here, 0).to(tl.int32) << 16
        joined = rounded + tl.load(master + at, here, 0).to(tl.int32)
        p = tl.where((joined & 0x7FFFFFFF) < 0x7FFF8000, joined, rounded).to(tl.float32, bitcast=True)
    else:
        p = tl.load(master + at, here, 0.0)
        stored = tl.load(param + at, here, 0)
        p = tl.where(_half_bits(p) == stored, p, stored.to(tl.float16, bitcast=True).to(tl.float32))

    if LOOP == 0 or LOOP == 1:
        m = tl.load(first + at, here, 0.0)
        v = tl.load(second + at, here, 0.0)
        if LOOP == 1:
            g = g + p * l2
        else:
            p = p * param_factor
        difference = g - m
        if STARTS_NEAR:
            m = m + difference * m_weight
        else:
            m = g + difference * m_weight_less_1
        v = v * v_factor
        v = v + (g * v_weight) * g
        p = p + tl.div_rn(m * step_size, tl.sqrt_rn(v) * inv_bias2 + eps)
        tl.store(first + at, m, here)
        tl.store(second + at, v, here)
    elif LOOP == 2:
        s = tl.load(second + at, here, 0.0)
        g = g + p * l2
        s = s + g * g
        p = p + tl.div_rn(g * step_size, tl.sqrt_rn(s) + eps)
        tl.store(second + at, s, here)
    elif LOOP == 3:
        m = tl.load(first + at, here, 0.0)
        direction = m * one_less_blend + g * blend
        sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, direction))
        p = p * param_factor
        p = p + sign * step_size
        m = m * m_factor
        m = m + g * m_weight
        tl.store(first + at, m, here)
    else:
        m = tl.load(first + at, here, 0.0)
        g = g + p * l2
        m = m * m_factor
        m = m + g * m_weight
        if NESTEROV:
            p = p + (g + m * m_factor) * step_size
        else:
            p = p + m * step_size
        tl.store(first + at, m, here)

    # Store it, see `split` in torch_ops.
    if MASTER == 0:
        tl.store(param + at, p, here)
    elif MASTER == 1:
        bits = p.to(tl.int32, bitcast=True)
        bits = tl.where(p != p, (bits & -2147483648) | 0x7FC00000, bits)
        tl.store(param + at, ((bits + 0x8000) >> 16).to(tl.int16), here)
        tl.store(master + at, bits.to(tl.int16), here)
    else:
        tl.store(master + at, p, here)
        tl.store(param + at, _half_bits(p), here)


def norm_in_triton(values: torch.Tensor) -> torch.Tensor:
    """As `norm_in_torch`, without a copy of the values: each is read once, and squared and summed in float64."""
    flat = values.flatten()
    halves = flat.dtype == torch.bfloat16
    count = triton.cdiv(flat.numel(), _NORM_BLOCK)
    sums = torch.empty(count, dtype=torch.float64, device=values.device)
    if count:
        _sum_squares[(count,)](
            flat.view(torch.int16) if halves else flat, sums, flat.numel(), HALVES=halves, BLOCK=_NORM_BLOCK
        )
    return sums.sum().sqrt_()


@triton.jit
def _sum_squares(values, sums, numel, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    if HALVES:  # bfloat16 is the upper half of float32
        value = (tl.load(values + at, here, 0).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        value = tl.load(values + at, here, 0.0).to(tl.float64)
    tl.store(sums + program, tl.reduce(value * value, 0, _plus))


@triton.jit
def _plus(left, right):
    return left + right


@triton.jit
def _half_bits(value):
    """Like `_half_bits` in torch_ops."""
    sign = (value.to(tl.int32, bitcast=True) >> 16) & 0x8000
    return tl.where(value != value, (sign | 0x7E00).to(tl.int16), value.to(tl.float16).to(tl.int16, bitcast=True))
