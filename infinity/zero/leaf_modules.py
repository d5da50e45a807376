"""Leaf modules are gathered whole: for example, mixtures of experts in which ranks use different experts.

A leaf is one unit, or a part of one unit, however large it is. A list of modules is never called, so the module that
contains the list is gathered whole in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import nn

from infinity.config import LeafModules

_log = logging.getLogger(__name__)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_MARK = "_z3_leaf"  # an attribute of the module, which copies of it keep; accelerate's users read it


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes as leaves, for the next `initialize`.

    Args:
        leaf_module_classes: classes, or names of classes, with or without the name of their Python module.

    Returns:
        The modules of these classes.

    Raises:
        ValueError: the model has no such module.
    """
    return _find(model, list(leaf_module_classes), raise_if_not_found, add=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark of `set_z3_leaf_modules`."""
    return _find(model, list(leaf_module_classes), raise_if_not_found, add=False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as a leaf, or remove its mark."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are marked as leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module is marked as a leaf."""
    return bool(getattr(model, _MARK, False))


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules`. Return the modules, and the names that no module has.

    Raises:
        ValueError: `raise_if_not_found`, and no module has one of the names.
    """
    return _mark_found(model, _by_name(model, module_names), "named", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by the ends of their names. Return the modules, and the ends that no name has.

    Raises:
        ValueError: `raise_if_not_found`, and no name has one of the ends.
    """
    return _mark_found(model, _by_suffix(model, module_name_suffixes), "matching suffixes", flag, raise_if_not_found)


def apply_leaf_modules(model: nn.Module, named: LeafModules) -> None:
    """Mark the modules that a configuration names as leaves. Log a warning for names that the model does not have."""
    found = _named(model, named)
    _mark((module for _, members in found for module in members), True)
    unknown = [name for name, members in found if not members and name not in named.classes]
    if unknown:
        _log.warning("zero_optimization.leaf_module names modules that the model does not have: %s", unknown)


def called_leaves(model: nn.Module, named: LeafModules) -> frozenset[nn.Module]:
    """Return the leaves of a model, marked or named; in the place of a list of modules, the module that contains it."""
    leaves = {module for _, members in _named(model, named) for module in members}
    found = set()
    stack = [(model, model)]
    while stack:
        module, caller = stack.pop()
        called = caller if isinstance(module, _LISTS) else module
        if z3_leaf_module(module) or module in leaves:
            found.add(called)
        stack.extend((child, called) for child in module.children())
    return frozenset(found)


_Found = list[tuple[str, list[nn.Module]]]  # the modules of each name


def _named(model: nn.Module, named: LeafModules) -> _Found:
    classes = [(kind, _of_classes(model, [kind])) for kind in named.classes]
    return [*classes, *_by_name(model, named.names), *_by_suffix(model, named.name_suffixes)]


def _by_name(model: nn.Module, names: Iterable[str]) -> _Found:
    modules = dict(model.named_modules())
    return [(name, [modules[name]] if name in modules else []) for name in names]


def _by_suffix(model: nn.Module, ends: Iterable[str]) -> _Found:
    modules = dict(model.named_modules())
    return [(end, [modules[name] for name in modules if name.endswith(end)]) for end in dict.fromkeys(ends)]


def _of_classes(model: nn.Module, classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    return [module for module in model.modules() if any(_is_a(module, kind) for kind in classes)]


def _mark_found(
    model: nn.Module, found: _Found, named: str, flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark the found modules. Return them, and the names without a module."""
    missing = [name for name, members in found if not members]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules {named} {missing} found in model {model}")
    return _mark((module for _, members in found for module in members), flag), missing


def _mark(modules: Iterable[nn.Module], flag: bool) -> list[nn.Module]:
    """Set the mark of these modules to `flag`. Return each of them once."""
    marked = list(dict.fromkeys(modules))
    for module in marked:
        set_z3_leaf_module(module, flag)
    return marked


def _find(
    model: nn.Module, classes: list[type[nn.Module] | str], raise_if_not_found: bool, *, add: bool
) -> list[nn.Module]:
    if not all(isinstance(kind, (type, str)) for kind in classes):
        raise TypeError("leaf_module_classes must be classes, or names of classes")
    found = _of_classes(model, classes)
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {model}")
    return _mark(found, add)


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    own = type(module)
    if isinstance(kind, str):
        return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return issubclass(own, kind)
