"""What the model's parameters show: their unit's memory, or a NaN of the right shape while it is away."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from infinity.tiers import Params
from infinity.zero.model_parts import local_part, set_local_part
from infinity.zero.partition import Partition


class ParameterViews:
    """Points the model's parameters at values, see [Note: what a parameter shows] in executor.py.

    A parameter that is read while its unit is stored is NaN: loud, of the right shape, and free. Parameters that are
    lent stay as they are.

    Attributes:
        lent: slots of each unit.
        detached: the units' memory is about to go, so that no parameter may lie in it any more.
    """

    def __init__(self, model: nn.Module, partition: Partition, params: Params) -> None:
        self._params = params
        self._units = partition.units
        self._parameters = [[model.get_parameter(slot.name) for slot in unit.slots] for unit in partition.units]
        # Made when the unit is first in memory (a view of freed storage cannot be made), then kept.
        self._views: dict[int, list[torch.Tensor]] = {}
        self._shown: list[bool | None] = [None] * len(partition.units)  # None: neither values nor NaN of ours
        self.lent: list[set[int]] = [set() for _ in partition.units]
        self.detached = False

    def forget(self, unit: int) -> None:
        """Somebody else has written to the parameters' `data`."""
        self._shown[unit] = None

    @torch.inference_mode(False)
    def outdate(self, unit: int, *, trained: bool) -> None:
        """The unit's values are old, or those of its trained parameters.

        The rest of a backward pass may still need the others.
        """
        slots = self._units[unit].slots
        old = [index for index, slot in enumerate(slots) if slot.trainable or not trained]
        self._cover(unit, old)
        torch.autograd.graph.increment_version([self._parameters[unit][index] for index in old])

    @torch.inference_mode(False)
    def cover(self, unit: int) -> None:
        """The values of the unit's trained parameters may be old, or not: nobody sees any."""
        self._cover(unit, [index for index, slot in enumerate(self._units[unit].slots) if slot.trainable])

    def _cover(self, unit: int, slots: Sequence[int]) -> None:
        if self._shown[unit] is not False:
            self._set(unit, slots, self._nothing(unit))
            self._shown[unit] = None

    def values(self, unit: int, slot: int) -> torch.Tensor:
        """What the parameter lies in."""
        return local_part(self._parameters[unit][slot]).detach()

    @torch.inference_mode(False)
    def lend(self, unit: int, slot: int, values: torch.Tensor) -> None:
        """The model's parameter lies in `values` until it is taken back, wherever its unit goes meanwhile."""
        self.lent[unit].add(slot)
        set_local_part(self._parameters[unit][slot], values)

    @torch.inference_mode(False)  # a parameter must not become an inference tensor, which cannot be trained
    def show(self, unit: int) -> None:
        if self._shown[unit]:
            return
        if unit not in self._views:
            flat = self._params.tensor(unit)
            self._views[unit] = [
                flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self._units[unit].slots
            ]
        self._set(unit, range(len(self._views[unit])), self._views[unit])
        self._shown[unit] = True

    @torch.inference_mode(False)
    def hide(self, unit: int) -> None:
        if self._shown[unit] is False:
            return
        self._set(unit, range(len(self._parameters[unit])), self._nothing(unit))
        self._shown[unit] = False

    def _nothing(self, unit: int) -> list[torch.Tensor]:
        flat = self._params.tensor(unit)
        nothing = torch.full((), float("nan"), dtype=flat.dtype, device=flat.device)
        return [nothing.expand(slot.shape) for slot in self._units[unit].slots]

    def _set(self, unit: int, slots: Iterable[int], values: Sequence[torch.Tensor]) -> None:
        for slot in slots:
            if slot not in self.lent[unit]:
                set_local_part(self._parameters[unit][slot], values[slot])

    def lent_values(self, unit: int, slot: int) -> torch.Tensor | None:
        """What the parameter lies in while it is lent; None if it is not."""
        return self.values(unit, slot) if slot in self.lent[unit] else None

    @property
    def lends(self) -> bool:
        """Some parameter is lent."""
        return any(self.lent)

    def detach(self) -> None:
        """Leave the model's parameters without memory, before the memory goes."""
        self.detached = True
        self._views.clear()
        for unit in range(len(self._units)):
            self.hide(unit)
