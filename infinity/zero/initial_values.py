"""The values that a model has at `initialize`: take them out unit by unit, and give them back if `initialize` fails."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from infinity.errors import ConfigError, InfinityError
from infinity.tiers import StoredTensor
from infinity.zero.adapters import lora_rule, lora_values, name_before_wrapping
from infinity.zero.construction import made_in_files
from infinity.zero.meta import InitFunction, own_rule
from infinity.zero.model_parts import has_numbers, local_part, set_local_part
from infinity.zero.partition import UnitLayout
from infinity.zero.ranks import Ranks

_log = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Stored values of parameters, by their name in the model."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """Return the values, in the parameter's shape and in any floating-point dtype."""


@runtime_checkable
class FilesSource(WeightSource, Protocol):
    """Values in files, which may be used in place, or read in parts."""

    def stored(self, name: str) -> StoredTensor | None:
        """Return the place of the values in a file; None if they must be copied."""

    def fingerprint(self, name: str) -> str:
        """Return a string that depends on the parameter's values and not on their directory."""

    def read_slice(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Return consecutive elements of the values, flat."""


@dataclass
class _Original:
    """A parameter as it was before `initialize`.

    Attributes:
        values: None for a parameter on the meta device, and when only the tiers have the values.
        like: shape, strides and dtype of the values, without memory.
        places: for a parameter on the meta device: the modules that contain it, and its names in them.
    """

    param: nn.Parameter
    values: torch.Tensor | None
    like: torch.Tensor
    device: torch.device
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


class InitialValues:
    """The initial values of a model's parameters: the model's own, stored ones, or ones that a function creates.

    `detach` takes the values out of the model. It replaces meta parameters by real ones of the same shape (tied
    parameters stay tied). All others have no memory of their own after the tiers have their values.

    Args:
        init_function: creates the values of parameters on the meta device, and of parameters built under `zero.Init`.
            None to create the values of parameters on the meta device by the model's own rule.
        weights: stored values for these parameters.
        keep: whether to keep the model's own values until `initialize` has succeeded, because the tiers of this process
            will not have all of them.

    Attributes:
        made: parameters whose values are read or created, instead of taken from the model.
    """

    def __init__(
        self,
        model: nn.Module,
        init_function: InitFunction | None,
        weights: WeightSource | None = None,
        *,
        keep: bool = False,
    ) -> None:
        self._model = model
        self._weights = weights
        self._keep = keep
        self._originals: dict[str, _Original] = {}
        self._fresh: dict[str, torch.Tensor] = {}  # values that were read or created, and are not taken yet
        self.made = {n for n, p in model.named_parameters() if has_numbers(p) and p.is_meta}
        if init_function is not None or weights is not None:
            built = {n for n, p in model.named_parameters() if has_numbers(p) and made_in_files(p)}
            self.made |= {name for name in built if init_function is not None or self._stored(name)}
        # names in the weights, of parameters in `made`
        self._keys = {name: key for name in sorted(self.made) if (key := self._stored(name)) is not None}
        self._init_function = init_function or own_rule(model)
        self._check_weights()

    def in_files(self, trained: Container[str], ranks: Ranks) -> dict[str, StoredTensor]:
        """Return the places of the frozen parameters that are used in place, in the user's files.

        Raises:
            InfinityError: the ranks have different files.
        """
        if not isinstance(self._weights, FilesSource):
            return {}
        places = {name: self._weights.stored(key) for name, key in self._keys.items() if name not in trained}
        found = {name: place for name, place in places.items() if place is not None and place.nbytes}
        # Names of directories may differ, and times and inodes of copies do.
        facts = [(n, t.file.path.name, t.file.size, t.start, t.nbytes, str(t.dtype)) for n, t in found.items()]
        if any(others != facts for others in ranks.of_all(facts)):
            raise InfinityError(
                "the ranks read different weights in place: give all of them the same directory, or copies of it"
            )
        return found

    def detach(self) -> None:
        """Take the values out of the model's parameters."""
        for name, param in list(self._model.named_parameters()):
            if not has_numbers(param):
                continue
            if param.is_meta:
                places = _places(self._model, param)
                self._originals[name] = _Original(param, None, param, param.device, places)
                nothing = torch.full((), float("nan"), dtype=torch.float32, device="cpu").expand(param.shape)
                _put(places, nn.Parameter(nothing, requires_grad=param.requires_grad))
            else:
                values = local_part(param).data
                like = torch.empty_like(values, device="meta")
                self._originals[name] = _Original(param, values, like, values.device)
                set_local_part(param, _placeholder(values))

    def stored_alike(self, ranks: Ranks) -> Set[str]:
        """Return the parameters that each of several ranks can read from its own files, because all files are equal."""
        return self._keys.keys() if ranks.others_have(self._fingerprint) else frozenset()

    def _fingerprint(self) -> str | None:
        """Return a fingerprint of the stored values; None if they cannot be read in parts."""
        if not isinstance(self._weights, FilesSource):
            return None
        found = [(name, self._weights.fingerprint(key)) for name, key in self._keys.items()]
        return hashlib.sha256(repr(found).encode()).hexdigest()

    def read_slice(self, name: str, elements: slice) -> torch.Tensor:
        """Return consecutive elements of a parameter that is `stored_alike`, flat."""
        assert isinstance(self._weights, FilesSource)
        return self._weights.read_slice(self._keys[name], elements.start, elements.stop - elements.start)

    # Taking out #

    def take(self, unit: UnitLayout) -> dict[str, torch.Tensor]:
        """Return the initial values of a unit's parameters by name, flat, in their original dtype.

        Raises:
            ConfigError: nothing initialises a parameter on the meta device.
        """
        for info in unit.params:
            self._read(info.name)
        if any(self._value(info.name) is None for info in unit.params):
            self._initialise(unit)
        values = {info.name: self._value(info.name) for info in unit.params}
        for info in unit.params:
            self._fresh.pop(info.name, None)
        return {name: value.detach().cpu().reshape(-1) for name, value in values.items() if value is not None}

    def placed(self, unit: UnitLayout, inexact: Container[str]) -> None:
        """Record that the tiers have the unit's exact values, except of the parameters in `inexact`."""
        for info in unit.params:
            self._fresh.pop(info.name, None)
            if not self._keep and info.name not in inexact and info.name not in self.made:
                self._originals[info.name].values = None

    def _value(self, name: str) -> torch.Tensor | None:
        if name in self._fresh:
            return self._fresh[name]
        return None if name in self.made else self._originals[name].values

    def _read(self, name: str) -> None:
        """Read the values of a parameter if they are stored, or create them if it is an adapter's."""
        if name not in self.made or name in self._fresh:
            return
        if self._weights is not None and name in self._keys:
            self._fresh[name] = self._weights.read(self._keys[name])
        elif self._originals[name].places:
            fresh = lora_values(self._model, name, self._originals[name].like.shape)
            if fresh is not None:
                self._fresh[name] = fresh

    def _stored(self, name: str) -> str | None:
        """Return the name under which the weights have a parameter; None if they do not have it."""
        if self._weights is None:
            return None
        return next((known for known in (name, name_before_wrapping(name)) if known in self._weights), None)

    def _check_weights(self) -> None:
        """Log the parameters that the weights do not have.

        Raises:
            ConfigError: the model needs no values, or the weights have none of its parameters.
        """
        if self._weights is None:
            return
        if not self.made:
            raise ConfigError(
                "`weights` are given, but every parameter of the model has values already: load them into the model, "
                "or build it on the meta device (infinity.integrations.pretrained_model does)"
            )
        missing = sorted(self.made - self._keys.keys())
        if not missing:
            return
        if not any(self._stored(name) is not None for name, _ in self._model.named_parameters()):
            raise ConfigError(
                f"the weights have none of the model's parameters, neither `{missing[0]}` nor {len(missing) - 1} "
                "others on the meta device: they are of another model, or its names were changed by a wrapper"
            )
        new = [name for name in missing if lora_rule(self._model, name) is None]
        if len(new) == 1:
            _log.warning("parameter `%s` is not among the stored weights: it is newly initialised", new[0])
        elif new:
            _log.warning(
                "%d parameters, such as `%s`, are not among the stored weights: they are newly initialised",
                len(new),
                new[0],
            )

    def _initialise(self, unit: UnitLayout) -> None:
        """Give memory to the modules that own the unit's parameters, initialise them, and keep the values."""
        owners = dict.fromkeys(info.name.rpartition(".")[0] for info in unit.params)
        wanting = dict.fromkeys(info.name.rpartition(".")[0] for info in unit.params if self._value(info.name) is None)
        given: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}
        for owner in owners:  # all of them: a rule for an outer module writes to parameters that have values, too
            for name, param in self._model.get_submodule(owner).named_parameters(owner, recurse=False):
                if has_numbers(param):
                    if name in self._originals:
                        self._read(name)
                    given[name] = param, param.data
                    param.data = torch.full(param.shape, float("nan"), dtype=torch.float32, device="cpu")
        for module_name in _children_first(wanting, unit.name):
            self._init_function(self._model.get_submodule(module_name))
        for name, (param, before) in given.items():
            values, param.data = param.data, before
            if name not in self._originals or self._value(name) is not None:
                continue
            if values.isnan().any():
                raise ConfigError(
                    f"parameter `{name}` is on the meta device and initialising its module left it without values: "
                    "give the module a reset_parameters() method, or build the model in memory"
                )
            self._fresh[name] = values

    # Giving back #

    def read_back(
        self, units: Iterable[UnitLayout], stored: Callable[[UnitLayout], Mapping[str, torch.Tensor]]
    ) -> None:
        """Read the values that only the tiers have, before the tiers are closed. Log the units that cannot be read.

        Args:
            stored: reads the exact values of a unit's parameters, flat, by name.
        """
        for unit in units:
            originals = {info.name: self._originals[info.name] for info in unit.params}
            gone = {name: each for name, each in originals.items() if each.values is None and not each.places}
            if not gone:
                continue
            try:
                values = stored(unit)
            except Exception:
                _log.exception("the values of `%s` cannot be read back; the model is left without them", unit.name)
                continue
            for name, original in gone.items():
                whole = torch.empty_like(original.like, device=original.device)
                original.values = whole.copy_(values[name].view(whole.shape))

    def give_back(self) -> None:
        """Restore the model to its state before `initialize`."""
        for original in self._originals.values():
            if original.places:
                _put(original.places, original.param)
            elif original.values is not None:
                set_local_part(original.param, original.values)
            else:
                set_local_part(original.param, _placeholder(original.like, original.device))
        self._originals.clear()


def _children_first(owners: Iterable[str], unit_name: str) -> list[str]:
    """Return the owners, and the modules of the unit that contain them, inner ones first.

    The outer modules are included because an architecture's rule may be written for them (GPT-2 scales the output
    projections of a block by name, in the module that contains them).
    """
    names: dict[str, None] = {}
    for name in owners:
        names[name] = None
        while name.startswith(f"{unit_name}."):
            name = name.rpartition(".")[0]
            names[name] = None
    return sorted(names, key=lambda name: -name.count("."))


def _placeholder(like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return torch.full((), float("nan"), dtype=like.dtype, device=device or like.device).expand(like.shape)


def is_placeholder(values: torch.Tensor) -> bool:
    """Whether all values are NaN, as in a model, or a copy of a model, whose values an engine has or had."""
    if values.is_meta or not values.numel() or not bool(values[(0,) * values.ndim].isnan()):
        return False
    return bool(values.isnan().all())


def _places(model: nn.Module, param: nn.Parameter) -> list[tuple[nn.Module, str]]:
    """Every module that holds a parameter, and under which names."""
    return [
        (module, name)
        for module in model.modules()
        for name, each in module.named_parameters(recurse=False, remove_duplicate=False)
        if each is param
    ]


def _put(places: Iterable[tuple[nn.Module, str]], param: nn.Parameter) -> None:
    for module, name in places:
        module._parameters[name] = param  # in its order, and past what watches registrations
