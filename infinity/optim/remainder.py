"""The few elements of an update that cannot be reconstructed from the states.

See [Note: lost gradients] in csrc/adam/recovery.h: a rollback reconstructs all others from both slots of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Kept:
    """Positions in the shard, and the values of these elements; both 1-D."""

    positions: torch.Tensor
    values: torch.Tensor


class Remainder:
    """Gradients and parameters of one update, by their positions in the shard."""

    def __init__(self) -> None:
        self._grads: list[_Kept] = []
        self._params: list[_Kept] = []

    def keep_grads(self, positions: Sequence[int], start: int, grad: torch.Tensor) -> None:
        """Keep these elements of the shard's gradients `grad`; positions count from the element `start`."""
        if positions:
            places = _places(positions, start)
            self._grads.append(_Kept(places, grad[places]))

    def keep_params(self, positions: Sequence[int], start: int, bits: Sequence[int], dtype: torch.dtype) -> None:
        """Keep parameters with these old 16-bit patterns; positions count from the element `start`."""
        if positions:
            values = torch.tensor(bits, dtype=torch.uint16, device="cpu").view(dtype)
            self._params.append(_Kept(_places(positions, start), values))

    def put(self, grad: torch.Tensor | None, param: torch.Tensor | None) -> None:
        """Restore the kept elements in tensors of the whole shard."""
        for values, some in ((grad, self._grads), (param, self._params)):
            if values is not None:
                for kept in some:
                    values[kept.positions] = kept.values

    def forget_grads(self) -> None:
        """Drop the gradients, all of which are kept in another place."""
        self._grads.clear()

    def forget_params(self) -> int:
        """Drop the parameters and return their number."""
        count = sum(kept.values.numel() for kept in self._params)
        self._params.clear()
        return count


def _places(positions: Sequence[int], start: int) -> torch.Tensor:
    return torch.tensor(positions, dtype=torch.int64, device="cpu") + start
