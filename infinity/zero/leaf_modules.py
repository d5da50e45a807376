"""Leaf modules: those that are gathered whole, as experts of which ranks use different ones.

Each is one unit, or part of one, however large it is. A list of modules is never called, so the module that has it is
gathered whole in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from torch import nn

from infinity.config import LeafModules

_log = logging.getLogger(__name__)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_MARK = "_z3_leaf"  # an attribute of the module, which its copies have; accelerate's users read it


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Have the modules of these classes be leaves, from the next `initialize` on.

    Args:
        leaf_module_classes: classes, or their names with or without their modules'.

    Returns:
        The modules of these classes.

    Raises:
        ValueError: there is none.
    """
    return _find(model, list(leaf_module_classes), raise_if_not_found, add=True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The inverse."""
    return _find(model, list(leaf_module_classes), raise_if_not_found, add=False)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Have one module be a leaf, or be none."""
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves in a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """The module is a leaf."""
    return bool(getattr(model, _MARK, False))


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by names as `named_modules` has them; the modules, and names that none has.

    Raises:
        ValueError: there is such a name.
    """
    return _mark_found(model, _by_name(model, module_names), "named", flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by the ends of such names; the modules, and ends that none has.

    Raises:
        ValueError: there is such an end.
    """
    return _mark_found(model, _by_suffix(model, module_name_suffixes), "matching suffixes", flag, raise_if_not_found)


def apply_leaf_modules(model: nn.Module, named: LeafModules) -> None:
    """Have those be leaves that a configuration names, as far as the model has them."""
    found = _named(model, named)
    _mark((module for _, members in found for module in members), True)
    unknown = [name for name, members in found if not members and name not in named.classes]
    if unknown:
        _log.warning("zero_optimization.leaf_module names modules that the model does not have: %s", unknown)


def called_leaves(model: nn.Module, named: LeafModules) -> frozenset[nn.Module]:
    """The leaves in a model, also those that are only named; for lists of modules those that have them."""
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
    """The modules, marked, and the names of none."""
    missing = [name for name, members in found if not members]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules {named} {missing} found in model {model}")
    return _mark((module for _, members in found for module in members), flag), missing


def _mark(modules: Iterable[nn.Module], flag: bool) -> list[nn.Module]:
    """Each of them once, marked."""
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
