"""What the model's parameters show: their unit's memory, or a NaN of the right shape while it is away.

[Note: parameters that lie elsewhere]
`param.data = values` leaves the memory of the unit as it was, and would be undone when the parameter is next shown or
hidden: a write that is lost without a word. So wherever that is about to happen, and where values are used, it is seen
that parameters lie where they were put. Where they stay in memory and may be written to, what lies elsewhere is copied
to where it belongs, as `param.data.copy_(values)` would; elsewhere it is refused.

[Note: writes to placeholders]
`param.data.zero_()` and `nn.init.zeros_(param)` write to a placeholder without an error, and no version counter of the
parameter sees the first. A placeholder is therefore a copy-on-write tensor: the first write gives it a storage of its
own, which is seen without a look at the device. A few reads do the same (`data_ptr()`), so its value decides then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from infinity.errors import InfinityError
from infinity.tiers.unit_params import UnitParams
from infinity.zero.model_parts import is_distributed, local_part, set_local_part
from infinity.zero.partition import Unit

# Nobody has written to a placeholder, nor asked for its address; False for any other tensor.
_is_untouched = getattr(torch._C, "_is_cow_tensor")  # noqa: B009  # torch's stubs leave it out


@contextmanager
def _plainly() -> Iterator[None]:
    """What is made inside is an ordinary tensor, for parameters to lie in.

    In the user's inference mode it would be one that cannot be trained, and within a transform of `torch.func` one that
    is gone when the transform is over.
    """
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def version_of(param: nn.Parameter) -> int:
    """Changes with every operation that writes to it; one that was made in inference mode counts none."""
    return 0 if param.is_inference() else param._version


@dataclass
class _Lent:
    """A lent parameter as the tiers know it.

    Attributes:
        version: of the parameter.
        sums: of its values, if writes to its `data` are to be noticed.
    """

    version: int
    sums: torch.Tensor | None


@dataclass
class ModelViews:
    """What the views of all units share.

    Attributes:
        writable: while values are shown they may be written to, see [Note: parameters that lie elsewhere].
        lent_params: the identities of parameters that are lent.
        read: unit and slot of those that were lent in the pass that is running, whose copies the graph has.
        detached: the units' memory is about to go, so that no parameter may lie in it any more.
    """

    writable: bool
    lent_params: set[int] = field(default_factory=set)
    read: set[tuple[int, int]] = field(default_factory=set)
    detached: bool = False

    @property
    def lends(self) -> bool:
        """Some parameter is lent."""
        return bool(self.lent_params)


class UnitViews:
    """Points one unit's parameters at values, see [Note: what a parameter shows] in executor.py.

    A parameter that is read while its unit is stored is NaN: loud, of the right shape, and free. Parameters that are
    lent stay as they are.

    Args:
        params: the memory in which the values are.
        of_model: what the views of all units share.
    """

    def __init__(self, unit: Unit, model: nn.Module, params: UnitParams, of_model: ModelViews) -> None:
        self._unit = unit.index
        self._slots = unit.slots
        self._parameters = [model.get_parameter(slot.name) for slot in unit.slots]
        self._params = params
        self._of_model = of_model
        self._divided = any(map(is_distributed, self._parameters))  # DTensors lie where their local parts do
        # Views of the memory; made when the unit is first there (a view of freed storage cannot be made), then kept.
        self._views: list[torch.Tensor] | None = None
        self._placeholders: list[torch.Tensor] | None = None  # made once
        self._shown: bool | None = None  # whether values are shown, or NaN; None: neither values nor NaN of ours
        # Where each was put; None where nobody knows: somebody else has put it there, or is about to.
        self._lies: list[torch.Tensor | None] = [None] * len(unit.slots)
        self._lent: dict[int, _Lent] = {}  # by slot

    def forget(self) -> None:
        """Somebody else has written to the parameters' `data`."""
        self._shown = None
        self._lies = [None] * len(self._lies)

    def _look(self) -> None:
        """Check that the unit's parameters lie where they were put, see [Note: parameters that lie elsewhere].

        Raises:
            InfinityError: one does not, and cannot be brought there.
        """
        strays = []
        placeholders = self._placeholders
        with torch._C.DisableTorchFunction():  # this is no use of the parameters, see reads.py
            for slot, (param, place) in enumerate(zip(self._parameters, self._lies, strict=True)):
                if place is None or slot in self._lent:
                    continue
                lies = local_part(param) if self._divided else param
                if lies.shape != place.shape or lies.stride() != place.stride():
                    strays.append(slot)
                elif _is_untouched(place):  # its address would be taken for a write
                    if lies.untyped_storage()._cdata != place.untyped_storage()._cdata:
                        strays.append(slot)
                elif lies.data_ptr() != place.data_ptr() or (placeholders is not None and placeholders[slot] is place):
                    strays.append(slot)
            if strays:
                self._bring_back(strays)

    @_plainly()
    def _bring_back(self, strays: Sequence[int]) -> None:
        """Have these parameters lie where they were put, and renew the placeholders that somebody has touched."""
        refused = ""
        for slot in strays:
            param, place = self._parameters[slot], self._lies[slot]
            assert place is not None
            lies = local_part(param)
            if _same_place(lies, place):
                if _is_written(place):
                    refused = refused or self._refusal(slot, lies, "written to")
                self._renew(slot)
                continue
            if self._of_model.writable and self._shown and lies.shape == place.shape:
                place.copy_(lies.detach())
            else:
                refused = refused or self._refusal(slot, lies)
            set_local_part(param, place)
            torch.autograd.graph.increment_version(param)  # a graph of before must not compute with these
        if refused:
            raise InfinityError(refused)

    def _refusal(self, slot: int, lies: torch.Tensor, what: str = "set to another tensor") -> str:
        known = self._slots[slot]
        if lies.shape != known.shape:
            return (
                f"`{known.name}`.data was set to a tensor of shape {tuple(lies.shape)}, but its states are of "
                f"{tuple(known.shape)}, and it is as it was: change the model before initialize"
            )
        return (
            f"`{known.name}`.data was {what} while the parameter's values are in their tier, or about to be updated, "
            "so that nothing would use it, and is as it was: change it in "
            "zero.GatheredParameters(..., modifier_rank=0), or with load_state_dict"
        )

    def outdate(self, slots: Collection[int] | None = None) -> None:
        """The unit's values are old, or those of these slots.

        The rest of a backward pass may still need the others.
        """
        old = range(len(self._parameters)) if slots is None else sorted(slots)
        self._cover(old)
        changed = [self._parameters[index] for index in old if index not in self._lent]
        torch.autograd.graph.increment_version(changed)

    def cover(self) -> None:
        """The values of the unit's trained parameters may be old, or not: nobody sees any."""
        self._cover([index for index, slot in enumerate(self._slots) if slot.trainable])

    def _cover(self, slots: Sequence[int]) -> None:
        if self._shown is not False:
            self._look()
            self._set(slots, self._nothing())
            self._shown = None

    def values(self, slot: int) -> torch.Tensor:
        """What the parameter lies in."""
        return local_part(self._parameters[slot]).detach()

    @_plainly()
    def lend(self, slot: int, values: torch.Tensor, *, watched: bool) -> None:
        """The model's parameter lies in `values` until it is taken back, wherever its unit goes meanwhile.

        Args:
            watched: `rewritten` will be asked, which costs two passes over the values.
        """
        self._lent[slot] = _Lent(version_of(self._parameters[slot]), _sums(values) if watched else None)
        set_local_part(self._parameters[slot], values)
        self._of_model.lent_params.add(id(self._parameters[slot]))
        self._of_model.read.add((self._unit, slot))

    def take_back(self, slot: int) -> None:
        """The parameter is not lent any more; where it lies now is for the caller to say."""
        self._lent.pop(slot, None)
        self._of_model.lent_params.discard(id(self._parameters[slot]))

    def keeps(self, slot: int) -> None:
        """The tiers have what the lent parameter has now."""
        sums = None if self._lent[slot].sums is None else _sums(self.values(slot))
        self._lent[slot] = _Lent(version_of(self._parameters[slot]), sums)

    def changed(self, slot: int) -> bool:
        """An operation has written to the lent parameter since then; one on its `.data` is not noticed."""
        return version_of(self._parameters[slot]) != self._lent[slot].version

    def rewritten(self, slot: int) -> bool:
        """The lent parameter, which is watched, has other values than then."""
        sums = self._lent[slot].sums
        return sums is not None and not torch.equal(_sums(self.values(slot)), sums)

    def show(self) -> None:
        self._look()
        if self._shown:
            return
        self._set(range(len(self._slots)), self._views or self._make_views())
        self._shown = True

    def hide(self) -> None:
        self._look()
        if self._shown is False:
            return
        self._set(range(len(self._slots)), self._nothing())
        self._shown = False

    @_plainly()
    def _make_views(self) -> list[torch.Tensor]:
        """A view of the unit's memory for each slot, made once."""
        flat = self._params.tensor
        self._views = [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self._slots]
        return self._views

    @_plainly()
    def _nothing(self) -> list[torch.Tensor]:
        """A placeholder for each slot of the unit, made once."""
        if self._placeholders is None:
            flat = self._params.tensor
            self._placeholders = [_placeholder(flat, slot.shape) for slot in self._slots]
        return self._placeholders

    def _renew(self, slot: int) -> None:
        """Have another placeholder, so that it is seen again whether somebody writes to it."""
        placeholders = self._placeholders
        assert placeholders is not None
        placeholders[slot] = _placeholder(placeholders[slot], self._slots[slot].shape)
        self._set([slot], placeholders)

    def _set(self, slots: Iterable[int], values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():  # this is no use of the parameters, see reads.py
            for slot in slots:
                if slot in self._lent:
                    continue
                self._lies[slot] = None  # an interrupt must not look as if somebody else had put it there
                if self._divided:
                    _set_part(self._parameters[slot], values[slot])
                else:
                    self._parameters[slot].data = values[slot]
                self._lies[slot] = values[slot]

    def lent_values(self, slot: int) -> torch.Tensor | None:
        """What the parameter lies in while it is lent; None if it is not."""
        return self.values(slot) if slot in self._lent else None

    def shows(self) -> bool:
        """The unit's parameters lie in its memory, but for those that are lent."""
        return self._shown is True

    def detach(self) -> None:
        """Leave the parameters without memory, before the memory goes."""
        self._views = None
        self.forget()
        self.hide()


def _same_place(lies: torch.Tensor, place: torch.Tensor) -> bool:
    if lies.stride() != place.stride() or lies.shape != place.shape:
        return False
    if _is_untouched(place):  # its address would be taken for a write
        return bool(lies.untyped_storage()._cdata == place.untyped_storage()._cdata)
    return lies.data_ptr() == place.data_ptr()


@_plainly()
def _set_part(param: nn.Parameter, values: torch.Tensor) -> None:
    set_local_part(param, values)  # which may make another DTensor


def _placeholder(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    return torch._lazy_clone(nothing).expand(shape)


def _is_written(placeholder: torch.Tensor) -> bool:
    """It is not NaN any more; one of integers never was."""
    if not placeholder.numel() or not placeholder.is_floating_point():
        return False
    return not bool(placeholder[(0,) * placeholder.dim()].float().isnan())


def _sums(values: torch.Tensor) -> torch.Tensor:
    """A checksum of the bits of values, on their device.

    It has the sum over each of so many columns of words, at memory speed. Few words are their own sum, and an odd
    number of columns notices rows of a weight that change places.
    """
    columns = 4093
    flat = values.detach().clone() if values.storage_offset() else values.detach().contiguous()
    data = flat.view(-1).view(torch.uint8)
    whole = data.numel() - data.numel() % (8 * columns)
    sums = data[:whole].view(torch.int64).view(-1, columns).sum(0)
    return torch.cat([sums.view(torch.uint8), data[whole:]])
