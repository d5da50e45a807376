"""Memory-centric tiling: a linear layer in parts that are fetched, used and released one after the other."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import nn

from infinity.errors import ConfigError


class Tile(nn.Linear):
    """One part of a `TiledLinear`. It is a unit of its own anywhere in the model.

    Args:
        fan_in: number of inputs of the whole layer, which determines the initial distribution.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        fan_in: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.fan_in = fan_in
        super().__init__(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Initialise the values with the distribution of an `nn.Linear` of the whole layer's size."""
        bound = 1 / math.sqrt(self.fan_in)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)


class TiledLinear(nn.Module):
    """A linear layer `(..., in_features) -> (..., out_features)` whose weight is fetched in tiles, never as a whole.

    The weight is cut into `out_splits` times `in_splits` tiles of nearly the same size, and each is a unit.
    Products over the inputs' parts are added in the compute dtype, so with `in_splits > 1` results differ from
    `nn.Linear`'s by rounding; with `in_splits = 1` each output is the same sum.

    After "memory-centric tiling" of ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1.3).

    Args:
        in_splits, out_splits: parts of the inputs and of the outputs.
        input_is_already_split: `forward` is given the parts of the input, in a sequence.
        combine_out_splits: concatenate the parts of the output; else `forward` returns them in a list.
        init_linear: take the values of this layer.

    Attributes:
        linears: the tiles by part of the output, and in that by part of the input; the last one of each row has the
            part of the bias.
        in_parts, out_parts: where the parts of the inputs and of the outputs begin, and the last one ends.

    Raises:
        ConfigError: a number of parts is not between 1 and the number of features, or `init_linear` has another shape.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        init_linear: nn.Linear | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = _sizes("in", in_features, in_splits)
        self.out_sizes = _sizes("out", out_features, out_splits)
        self.in_parts, self.out_parts = ([0, *accumulate(sizes)] for sizes in (self.in_sizes, self.out_sizes))
        last = len(self.in_sizes) - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                Tile(columns, rows, bias and part == last, in_features, device, dtype)
                for part, columns in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        parts = self._split(x)
        outputs = []
        for row in self._rows():
            products = (tile(part) for tile, part in zip(row, parts, strict=True))
            outputs.append(functools.reduce(torch.add, products))
        return torch.cat(outputs, dim=-1) if self.combine_out_splits else outputs

    def _rows(self) -> list[list[Tile]]:
        """Return the tiles: one list for each part of the output, with one tile for each part of the input."""
        return [list(cast("Iterable[Tile]", row)) for row in self.linears]

    def _split(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if isinstance(x, torch.Tensor):
            if not self.input_is_already_split:
                return cast("Sequence[torch.Tensor]", x.split(self.in_sizes, dim=-1))
            given = f"a tensor of shape {tuple(x.shape)}"
        else:
            widths = [part.shape[-1] for part in x]
            if self.input_is_already_split and widths == self.in_sizes:
                return x
            given = f"parts of widths {widths}"
        wanted = f"parts of widths {self.in_sizes}" if self.input_is_already_split else "one tensor"
        raise ConfigError(f"this TiledLinear takes {wanted} (input_is_already_split), and was given {given}")

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of a layer of the same shape. Both must be in memory: before `initialize`, or gathered.

        Raises:
            ConfigError: it has another shape, only one of the two has a bias, or one is not in memory.
        """
        ours = (self.out_features, self.in_features, self._rows()[0][-1].bias is not None)
        theirs = (other.out_features, other.in_features, other.bias is not None)
        if ours != theirs:
            raise ConfigError(
                f"a TiledLinear of (outputs, inputs, bias) {ours} cannot take the values of one of {theirs}"
            )
        for param in (*self.parameters(), *other.parameters()):
            if param.is_meta or (param.numel() > 1 and not any(param.stride())):
                raise ConfigError(
                    "copy_params_from needs the values of both layers in memory: call it before initialize and outside "
                    "of zero.Init, or gather the parameters (infinity.zero.GatheredParameters)"
                )
        for row, weights in zip(self._rows(), other.weight.split(self.out_sizes), strict=True):
            for tile, weight in zip(row, weights.split(self.in_sizes, dim=1), strict=True):
                tile.weight.copy_(weight)
        if other.bias is not None:
            for row, bias in zip(self._rows(), other.bias.split(self.out_sizes), strict=True):
                row[-1].bias.copy_(bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _sizes(side: str, features: int, splits: int) -> list[int]:
    """Return the lengths of nearly equal parts."""
    if not 1 <= splits <= features:
        raise ConfigError(f"{side}_splits is {splits}; it must be from 1 to {side}_features, {features}")
    return [features // splits + (part < features % splits) for part in range(splits)]
