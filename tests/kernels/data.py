"""Random tensors with everything in them that arithmetic trips over."""

from __future__ import annotations

import torch

from infinity.kernels import Hyper

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
CHUNK = 128 * 256  # elements of one piece of work in csrc/adam


def wild(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values whose magnitudes run from denormal to 1e15, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values *= 10.0 ** torch.randint(-44, 16, (numel,), generator=generator)
    values[::7] = 0.0
    values[3::11] = -0.0
    return values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: equality that tells zeros apart and takes NaN as it is."""
    return tensor.contiguous().view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """A copy that starts `elements` elements past an aligned address."""
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)
    view = room[elements:]
    view.copy_(tensor)
    return view
