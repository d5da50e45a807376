"""Point the model's parameters at their unit's memory, or at a NaN of the right shape while it is not resident.

[Note: parameters that lie elsewhere]
`param.data = values` leaves the unit's memory unchanged, and the next `show` or `hide` would silently undo it. So each
`show`, `hide`, update, and read of the unit's memory checks that parameters still lie where they were put. A parameter
that lies elsewhere is copied into its unit's memory, as `param.data.copy_(values)` would do, if that memory is shown
and may be written to. Otherwise it is refused.

[Note: writes to placeholders]
`param.data.zero_()` and `nn.init.zeros_(param)` write to a placeholder without an error, and the parameter's version
counter misses the first. A placeholder is therefore a copy-on-write tensor: the first write gives it its own storage,
which can be detected without reading the device. A few reads do the same (`data_ptr()`), so its value decides then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from infinity.errors import InfinityError
from infinity.tiers.unit_params import UnitParams
from infinity.zero.model_parts import is_distributed, local_part, set_local_part
from infinity.zero.partition import UnitLayout

# True until the placeholder is written to or asked for its address; False for any other tensor.
_is_untouched = getattr(torch._C, "_is_cow_tensor")  # noqa: B009  # torch's stubs leave it out


@contextmanager
def _plainly() -> Iterator[None]:
    """Make ordinary tensors inside, for parameters to lie in.

    In the user's inference mode they could not be trained; in a transform of `torch.func` they would die with it.
    """
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def version_of(param: nn.Parameter) -> int:
    """Return a counter that changes with each in-place operation; constant for tensors made in inference mode."""
    return 0 if param.is_inference() else param._version


@dataclass
class _Lent:
    """The state of a lent parameter when the tiers last had its values.

    Attributes:
        version: see `version_of`.
        sums: checksum of the values, if writes to `param.data` are to be detected.
    """

    version: int
    sums: torch.Tensor | None


@dataclass
class ModelViews:
    """State shared by the views of all units.

    Attributes:
        writable: shown values may be written to, see [Note: parameters that lie elsewhere].
        lent_params: identities of lent parameters.
        read: unit and index of parameters lent in the running pass: the graph holds their copies.
        detached: the units' memory is about to be freed, so no parameter may lie in it.
    """

    writable: bool
    lent_params: set[int] = field(default_factory=set)
    read: set[tuple[int, int]] = field(default_factory=set)
    detached: bool = False


class UnitViews:
    """Point one unit's parameters at values, see [Note: what a parameter shows] in executor.py.

    A read of a parameter whose unit is stored gives NaN: loud, of the right shape, and free. Lent parameters are left
    alone.

    Args:
        params: the memory with the values.
        of_model: state shared by the views of all units.
    """

    def __init__(self, unit: UnitLayout, model: nn.Module, params: UnitParams, of_model: ModelViews) -> None:
        self._unit = unit.index
        self._infos = unit.params
        self._parameters = [model.get_parameter(info.name) for info in unit.params]
        self._params = params
        self._of_model = of_model
        self._divided = any(map(is_distributed, self._parameters))  # a DTensor lies where its local part does
        # Views of the memory. Made when the unit first has memory (a view of freed storage cannot be made), then kept.
        self._views: list[torch.Tensor] | None = None
        self._placeholders: list[torch.Tensor] | None = None  # made once
        self._shown: bool | None = None  # values (True) or NaN (False); None: neither is certain
        # The tensor that each parameter was pointed at; None if unknown: other code has moved it, or a move is under
        # way.
        self._lies: list[torch.Tensor | None] = [None] * len(unit.params)
        self._lent: dict[int, _Lent] = {}  # by the index of the parameter
        # By the index of the parameter: its version counter, to be restored if a speculative update is rolled back.
        self._versions: dict[int, _unsafe_preserve_version_counter] = {}

    def forget(self) -> None:
        """Forget where the parameters lie: other code has set their `data`."""
        self._shown = None
        self._lies = [None] * len(self._lies)

    def look(self) -> None:
        """Check that the unit's parameters lie where they were put, see [Note: parameters that lie elsewhere].

        Raises:
            InfinityError: one does not, and cannot be moved back.
        """
        strays = []
        placeholders = self._placeholders
        with torch._C.DisableTorchFunction():  # not a use of the parameters, see reads.py
            for index, (param, place) in enumerate(zip(self._parameters, self._lies, strict=True)):
                if place is None or index in self._lent:
                    continue
                lies = local_part(param) if self._divided else param
                if lies.shape != place.shape or lies.stride() != place.stride():
                    strays.append(index)
                elif _is_untouched(place):  # `data_ptr()` would count as a write
                    if lies.untyped_storage()._cdata != place.untyped_storage()._cdata:
                        strays.append(index)
                elif lies.data_ptr() != place.data_ptr() or (placeholders is not None and placeholders[index] is place):
                    strays.append(index)
            if strays:
                self._bring_back(strays)

    @_plainly()
    def _bring_back(self, strays: Sequence[int]) -> None:
        """Move these parameters back, and replace placeholders that were written to."""
        refused = ""
        for index in strays:
            param, place = self._parameters[index], self._lies[index]
            assert place is not None
            lies = local_part(param)
            if _same_place(lies, place):
                if _is_written(place):
                    refused = refused or self._refusal(index, lies, "written to")
                self._renew(index)
                continue
            if self._of_model.writable and self._shown and lies.shape == place.shape:
                place.copy_(lies.detach())
            else:
                refused = refused or self._refusal(index, lies)
            set_local_part(param, place)
            self._versions.pop(index, None)
            torch.autograd.graph.increment_version(param)  # a backward pass through an older graph must fail
        if refused:
            raise InfinityError(refused)

    def _refusal(self, index: int, lies: torch.Tensor, what: str = "set to another tensor") -> str:
        known = self._infos[index]
        if lies.shape != known.shape:
            return (
                f"`{known.name}`.data was set to a tensor of shape {tuple(lies.shape)}, but its states are of "
                f"{tuple(known.shape)}. The parameter keeps its shape and values: change the model before initialize"
            )
        return (
            f"`{known.name}`.data was {what} while the parameter's values are in their tier, or about to be "
            "updated. The change has no effect: make it in zero.GatheredParameters(..., modifier_rank=0), or with "
            "load_state_dict"
        )

    def mark_stale(self, indices: Collection[int] | None = None) -> None:
        """Hide stale values of the unit, or only of these parameters: the backward pass may still need the others.

        For autograd this is an in-place change.
        """
        old = range(len(self._parameters)) if indices is None else sorted(indices)
        self._hide(old)
        for index in old:
            self._versions.pop(index, None)
        self._increment_versions(old)

    def hide_trained(self) -> None:
        """Hide the trained parameters during a speculative update, which may be rolled back.

        For autograd this is an in-place change, until `show` shows the same values again: a backward pass reads
        parameters that the loss itself has used before it runs any hook, and must fail instead of reading NaN.
        """
        trained = [index for index, info in enumerate(self._infos) if info.trainable]
        self._hide(trained)
        for index in trained:
            if index not in self._versions and index not in self._lent:
                self._versions[index] = _unsafe_preserve_version_counter(self._parameters[index])
        self._increment_versions(trained)

    def _increment_versions(self, indices: Iterable[int]) -> None:
        changed = [self._parameters[index] for index in indices if index not in self._lent]
        torch.autograd.graph.increment_version(changed)

    def _restore_versions(self) -> None:
        while self._versions:
            self._versions.popitem()[1].__exit__()

    def _hide(self, indices: Sequence[int]) -> None:
        if self._shown is not False:
            self.look()
            self._set(indices, self._nothing())
            self._shown = None

    def values(self, index: int) -> torch.Tensor:
        return local_part(self._parameters[index]).detach()

    @_plainly()
    def lend(self, index: int, values: torch.Tensor, *, watched: bool) -> None:
        """Let the model's parameter lie in `values` until `take_back`, wherever its unit is meanwhile.

        Args:
            watched: `rewritten` will be called; costs two passes over the values.
        """
        self._lent[index] = _Lent(version_of(self._parameters[index]), _sums(values) if watched else None)
        set_local_part(self._parameters[index], values)
        self._of_model.lent_params.add(id(self._parameters[index]))
        self._of_model.read.add((self._unit, index))

    def take_back(self, index: int) -> None:
        """End the lending. The caller decides where the parameter lies now."""
        self._lent.pop(index, None)
        self._of_model.lent_params.discard(id(self._parameters[index]))

    def keeps(self, index: int) -> None:
        """Note that the tiers have the lent parameter's present values."""
        sums = None if self._lent[index].sums is None else _sums(self.values(index))
        self._lent[index] = _Lent(version_of(self._parameters[index]), sums)

    def changed(self, index: int) -> bool:
        """Whether an operation has written to the lent parameter since. Misses writes to its `.data`."""
        return version_of(self._parameters[index]) != self._lent[index].version

    def rewritten(self, index: int) -> bool:
        """Whether the values of the lent parameter, which is watched, have changed since."""
        sums = self._lent[index].sums
        return sums is not None and not torch.equal(_sums(self.values(index)), sums)

    def show(self) -> None:
        self.look()
        if self._shown:
            return
        self._set(range(len(self._infos)), self._views or self._make_views())
        self._restore_versions()
        self._shown = True

    def hide(self) -> None:
        self.look()
        if self._shown is False:
            return
        self._set(range(len(self._infos)), self._nothing())
        self._shown = False

    @_plainly()
    def _make_views(self) -> list[torch.Tensor]:
        """Make a view of the unit's memory for each parameter, once."""
        flat = self._params.tensor
        self._views = [flat[info.offset : info.offset + info.numel].view(info.shape) for info in self._infos]
        return self._views

    @_plainly()
    def _nothing(self) -> list[torch.Tensor]:
        """Make a placeholder for each parameter, once."""
        if self._placeholders is None:
            flat = self._params.tensor
            self._placeholders = [_placeholder(flat, info.shape) for info in self._infos]
        return self._placeholders

    def _renew(self, index: int) -> None:
        """Replace a placeholder, so that the next write to it is detected again."""
        placeholders = self._placeholders
        assert placeholders is not None
        placeholders[index] = _placeholder(placeholders[index], self._infos[index].shape)
        self._set([index], placeholders)

    def _set(self, indices: Iterable[int], values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():  # not a use of the parameters, see reads.py
            for index in indices:
                if index in self._lent:
                    continue
                self._lies[index] = None  # after an interrupt, the old entry would look like a move by other code
                if self._divided:
                    _set_part(self._parameters[index], values[index])
                else:
                    self._parameters[index].data = values[index]
                self._lies[index] = values[index]

    def lent_values(self, index: int) -> torch.Tensor | None:
        """Return the tensor that the parameter lies in while it is lent; None if it is not."""
        return self.values(index) if index in self._lent else None

    def shows(self) -> bool:
        """Whether the unit's parameters, except lent ones, lie in its memory."""
        return self._shown is True

    def detach(self) -> None:
        """Detach the parameters from the memory, before it is freed."""
        self._views = None
        self.forget()
        self.hide()


def _same_place(lies: torch.Tensor, place: torch.Tensor) -> bool:
    if lies.stride() != place.stride() or lies.shape != place.shape:
        return False
    if _is_untouched(place):  # `data_ptr()` would count as a write
        return bool(lies.untyped_storage()._cdata == place.untyped_storage()._cdata)
    return lies.data_ptr() == place.data_ptr()


@_plainly()
def _set_part(param: nn.Parameter, values: torch.Tensor) -> None:
    set_local_part(param, values)  # may make another DTensor


def _placeholder(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    return torch._lazy_clone(nothing).expand(shape)


def _is_written(placeholder: torch.Tensor) -> bool:
    """Whether the placeholder is no longer NaN. Placeholders of integers never are."""
    if not placeholder.numel() or not placeholder.is_floating_point():
        return False
    return not bool(placeholder[(0,) * placeholder.dim()].float().isnan())


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the bits of the values, on their device.

    It sums each of 4093 columns of words, at memory speed. With this odd number, swapped rows of a weight change the
    sums.
    """
    columns = 4093
    flat = values.detach().clone() if values.storage_offset() else values.detach().contiguous()
    data = flat.view(-1).view(torch.uint8)
    whole = data.numel() - data.numel() % (8 * columns)
    sums = data[:whole].view(torch.int64).view(-1, columns).sum(0)
    return torch.cat([sums.view(torch.uint8), data[whole:]])
