"""Point the model's parameters at their unit's memory, or at a NaN of the right shape while the unit is not resident.

[Note: parameters that lie elsewhere]
`param.data = values` does not change the unit's memory, and the next `show` or `hide` would undo it without an error.
So each `show`, `hide`, update, and read of the unit's memory checks that the parameters still point where `show` or
`hide` set them. If a parameter points to another tensor, its values are copied into the unit's memory, as
`param.data.copy_(values)` would do, if that memory is shown and may be written to. Otherwise an error is raised.

[Note: writes to placeholders]
`param.data.zero_()` and `nn.init.zeros_(param)` write to a placeholder without an error. The parameter's version
counter does not count the first of the two. A placeholder is therefore a copy-on-write tensor: the first write gives it
its own storage, which can be detected without reading from the device. A few reads (`data_ptr()`) also give it its own
storage, so its value is then read to see whether it is still NaN.
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
from infinity.zero.partition import ParamInfo, UnitLayout

# True until the placeholder is written to or asked for its address; False for any other tensor.
_is_untouched = getattr(torch._C, "_is_cow_tensor")  # noqa: B009  # torch's stubs leave it out


@contextmanager
def _plainly() -> Iterator[None]:
    """Create ordinary tensors in this context, which parameters can point at.

    Tensors of an inference mode could not be trained. Tensors of a `torch.func` transform are invalid after it.
    """
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def version_of(param: nn.Parameter) -> int:
    """Return a counter that changes with each in-place operation; constant for tensors made in inference mode."""
    return 0 if param.is_inference() else param._version


@dataclass
class _Lent:
    """The state of a lent parameter when the tiers last had the same values.

    Attributes:
        version: see `version_of`.
        sums: checksum of the values; None if writes to `param.data` need not be detected.
    """

    version: int
    sums: torch.Tensor | None


@dataclass(slots=True, eq=False)
class _Param:
    """One of the unit's parameters in the model.

    Attributes:
        index: its number in the unit.
        lies: the tensor that it points at; None if unknown, because other code set it, or it is being set.
        lent: None if it is not lent.
        counter: its version counter, to be restored if a speculative update is rolled back; None if there is none.
    """

    index: int
    info: ParamInfo
    param: nn.Parameter
    lies: torch.Tensor | None = None
    lent: _Lent | None = None
    counter: _unsafe_preserve_version_counter | None = None


@dataclass
class ModelViews:
    """State shared by the views of all units.

    Attributes:
        writable: whether the user may write to shown values, see [Note: parameters that lie elsewhere].
        lent_params: identities of lent parameters.
        lent_in_pass: unit and index of parameters that were lent in the running pass: the graph may have their copies.
        detached: whether the units' memory is about to be freed, so that no parameter may point at it.
    """

    writable: bool
    lent_params: set[int] = field(default_factory=set)
    lent_in_pass: set[tuple[int, int]] = field(default_factory=set)
    detached: bool = False


class UnitViews:
    """Point one unit's parameters at values, see [Note: what a parameter shows] in executor.py.

    While the unit is not resident, a parameter reads as NaN in the right shape, which takes no memory. Lent parameters
    are not changed.

    Args:
        params: the memory with the values.
        of_model: state shared by the views of all units.
    """

    def __init__(self, unit: UnitLayout, model: nn.Module, params: UnitParams, of_model: ModelViews) -> None:
        self._unit = unit.index
        self._each = [_Param(index, info, model.get_parameter(info.name)) for index, info in enumerate(unit.params)]
        self._params = params
        self._of_model = of_model
        self._divided = any(is_distributed(each.param) for each in self._each)  # for a DTensor, its local part counts
        # Views of the memory. Created when the unit first has memory (freed storage has no views), then kept.
        self._views: list[torch.Tensor] | None = None
        self._placeholders: list[torch.Tensor] | None = None  # created once
        self._shown: bool | None = None  # all show values (True) or NaN (False); None if neither is certain

    def forget(self) -> None:
        """Forget where the parameters point, because other code has set their `data`."""
        self._shown = None
        for each in self._each:
            each.lies = None

    def check(self) -> None:
        """Check where the unit's parameters point, see [Note: parameters that lie elsewhere].

        Raises:
            InfinityError: a parameter points to another tensor, whose values cannot be copied into the unit's memory.
        """
        strays = []
        placeholders = self._placeholders
        with torch._C.DisableTorchFunction():  # not a use of the parameters, see reads.py
            for each in self._each:
                place = each.lies
                if place is None or each.lent is not None:
                    continue
                lies = local_part(each.param) if self._divided else each.param
                if lies.shape != place.shape or lies.stride() != place.stride():
                    strays.append(each)
                elif _is_untouched(place):  # `data_ptr()` would count as a write
                    if lies.untyped_storage()._cdata != place.untyped_storage()._cdata:
                        strays.append(each)
                elif lies.data_ptr() != place.data_ptr() or (placeholders and placeholders[each.index] is place):
                    strays.append(each)
            if strays:
                self._bring_back(strays)

    @_plainly()
    def _bring_back(self, strays: Sequence[_Param]) -> None:
        """Point these parameters at the unit's memory again, and replace placeholders that were written to."""
        refused = ""
        for each in strays:
            place = each.lies
            assert place is not None
            lies = local_part(each.param)
            if _same_place(lies, place):
                if _is_written(place):
                    refused = refused or _refusal(each.info, lies, "written to")
                self._renew(each)
                continue
            if self._of_model.writable and self._shown and lies.shape == place.shape:
                place.copy_(lies.detach())
            else:
                refused = refused or _refusal(each.info, lies)
            set_local_part(each.param, place)
            each.counter = None
            torch.autograd.graph.increment_version(each.param)  # a backward pass through an older graph must fail
        if refused:
            raise InfinityError(refused)

    def mark_stale(self, indices: Collection[int] | None = None) -> None:
        """Hide stale values of the unit, or only of these parameters if the backward pass may still need the others.

        For autograd, this is an in-place change of the parameters.
        """
        old = self._each if indices is None else [self._each[index] for index in sorted(indices)]
        self._hide(old)
        for each in old:
            each.counter = None
        _increment_versions(old)

    def hide_trained(self) -> None:
        """Hide the trained parameters during a speculative update, which may be rolled back.

        For autograd, this is an in-place change, until `show` shows the same values again. If the loss itself used a
        parameter, a backward pass reads it before any hook runs. It must then fail instead of computing with NaN.
        """
        trained = [each for each in self._each if each.info.trainable]
        self._hide(trained)
        for each in trained:
            if each.counter is None and each.lent is None:
                each.counter = _unsafe_preserve_version_counter(each.param)
        _increment_versions(trained)

    def _hide(self, some: Iterable[_Param]) -> None:
        if self._shown is not False:
            self.check()
            self._set(some, self._placeholders or self._make_placeholders())
            self._shown = None

    def values(self, index: int) -> torch.Tensor:
        return local_part(self._each[index].param).detach()

    @_plainly()
    def lend(self, index: int, values: torch.Tensor, *, watched: bool) -> None:
        """Point the model's parameter at `values` until `take_back`, whether or not its unit is resident.

        Args:
            watched: whether `rewritten` will be called; it costs two passes over the values.
        """
        each = self._each[index]
        each.lent = _Lent(version_of(each.param), _sums(values) if watched else None)
        set_local_part(each.param, values)
        self._of_model.lent_params.add(id(each.param))
        self._of_model.lent_in_pass.add((self._unit, index))

    def take_back(self, index: int) -> None:
        """End `lend`. The caller must point the parameter at another tensor."""
        self._each[index].lent = None
        self._of_model.lent_params.discard(id(self._each[index].param))

    def mark_stored(self, index: int) -> None:
        """Record that the tiers have the current values of the lent parameter."""
        each, lent = self._lent(index)
        each.lent = _Lent(version_of(each.param), None if lent.sums is None else _sums(self.values(index)))

    def changed(self, index: int) -> bool:
        """Whether an operation, except on `.data`, has written to the lent parameter since `lend` or `mark_stored`."""
        each, lent = self._lent(index)
        return version_of(each.param) != lent.version

    def rewritten(self, index: int) -> bool:
        """Whether the lent parameter has other values than at `lend` or `mark_stored`; False if it is not watched."""
        sums = self._lent(index)[1].sums
        return sums is not None and not torch.equal(_sums(self.values(index)), sums)

    def _lent(self, index: int) -> tuple[_Param, _Lent]:
        each = self._each[index]
        assert each.lent is not None
        return each, each.lent

    def show(self) -> None:
        self.check()
        if self._shown:
            return
        self._set(self._each, self._views or self._make_views())
        for each in self._each:
            if each.counter is not None:
                counter, each.counter = each.counter, None
                counter.__exit__()
        self._shown = True

    def hide(self) -> None:
        self.check()
        if self._shown is False:
            return
        self._set(self._each, self._placeholders or self._make_placeholders())
        self._shown = False

    @_plainly()
    def _make_views(self) -> list[torch.Tensor]:
        """Create a view of the unit's memory for each parameter; called once."""
        flat, infos = self._params.tensor, [each.info for each in self._each]
        self._views = [flat[info.offset : info.offset + info.numel].view(info.shape) for info in infos]
        return self._views

    @_plainly()
    def _make_placeholders(self) -> list[torch.Tensor]:
        """Create a placeholder for each parameter; called once."""
        flat = self._params.tensor
        self._placeholders = [_placeholder(flat, each.info.shape) for each in self._each]
        return self._placeholders

    def _renew(self, each: _Param) -> None:
        """Replace a placeholder, so that the next write to it is detected again."""
        placeholders = self._placeholders
        assert placeholders is not None
        placeholders[each.index] = _placeholder(placeholders[each.index], each.info.shape)
        self._set([each], placeholders)

    def _set(self, some: Iterable[_Param], values: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunction():  # not a use of the parameters, see reads.py
            for each in some:
                if each.lent is not None:
                    continue
                each.lies = None  # after an interrupt, the old place would look like a change by other code
                if self._divided:
                    _set_part(each.param, values[each.index])
                else:
                    each.param.data = values[each.index]
                each.lies = values[each.index]

    def lent_values(self, index: int) -> torch.Tensor | None:
        """Return the tensor that the parameter points at while it is lent; None if it is not lent."""
        return None if self._each[index].lent is None else self.values(index)

    def shows(self) -> bool:
        """Whether the unit's parameters, except lent ones, point at the unit's memory."""
        return self._shown is True

    def detach(self) -> None:
        """Detach the parameters from the unit's memory, before this memory is freed.

        For autograd, this is an in-place change: a backward pass through an older graph would read freed memory.
        """
        self._views = None
        self.forget()
        self.mark_stale()


def _refusal(known: ParamInfo, lies: torch.Tensor, what: str = "set to another tensor") -> str:
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


def _increment_versions(some: Iterable[_Param]) -> None:
    changed = [each.param for each in some if each.lent is None]
    torch.autograd.graph.increment_version([param for param in changed if not param.is_inference()])


def _same_place(lies: torch.Tensor, place: torch.Tensor) -> bool:
    if lies.stride() != place.stride() or lies.shape != place.shape:
        return False
    if _is_untouched(place):  # `data_ptr()` would count as a write
        return bool(lies.untyped_storage()._cdata == place.untyped_storage()._cdata)
    return lies.data_ptr() == place.data_ptr()


@_plainly()
def _set_part(param: nn.Parameter, values: torch.Tensor) -> None:
    set_local_part(param, values)  # may create another DTensor


def _placeholder(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    nothing = torch.full((), float("nan"), dtype=like.dtype, device=like.device)
    return torch._lazy_clone(nothing).expand(shape)


def _is_written(placeholder: torch.Tensor) -> bool:
    """Whether the placeholder is no longer NaN. False for integers."""
    if not placeholder.numel() or not placeholder.is_floating_point():
        return False
    return not bool(placeholder[(0,) * placeholder.dim()].float().isnan())


def _sums(values: torch.Tensor) -> torch.Tensor:
    """Return a checksum of the bits of the values, on their device.

    It sums each of 4093 columns of 8-byte words, at memory speed. 4093 is odd, so that swapped rows of a weight change
    the sums.
    """
    columns = 4093
    flat = values.detach().clone() if values.storage_offset() else values.detach().contiguous()
    data = flat.view(-1).view(torch.uint8)
    whole = data.numel() - data.numel() % (8 * columns)
    sums = data[:whole].view(torch.int64).view(-1, columns).sum(0)
    return torch.cat([sums.view(torch.uint8), data[whole:]])
