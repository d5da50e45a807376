"""Leaf modules: those that are gathered whole, as experts of which ranks use different ones.

Each is one unit, or part of one, however large it is. A list of modules is never called, so the module that has it is
gathered whole in its place. The functions and their arguments are DeepSpeed's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from infinity.config import LeafModules

_log = logging.getLogger(__name__)
_LISTS = (nn.ModuleList, nn.ModuleDict)

_leaves: WeakSet[nn.Module] = WeakSet()


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
    (_leaves.add if flag else _leaves.discard)(model)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaves in a model."""
    return [module for module in model.modules() if module in _leaves]


def z3_leaf_module(model: nn.Module) -> bool:
    """The module is a leaf."""
    return model in _leaves


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by names as `named_modules` has them; the modules, and names that none has.

    Raises:
        ValueError: there is such a name.
    """
    modules = dict(model.named_modules())
    wanted = list(module_names)
    missing = [name for name in wanted if name not in modules]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model {model}")
    return _mark([modules[name] for name in wanted if name in modules], flag), missing


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same by the ends of such names; the modules, and ends that none has.

    Raises:
        ValueError: there is such an end.
    """
    modules = dict(model.named_modules())
    found = {end: [modules[name] for name in modules if name.endswith(end)] for end in module_name_suffixes}
    missing = [end for end in found if not found[end]]
    if missing and raise_if_not_found:
        raise ValueError(f"No modules matching suffixes {missing} found in model {model}")
    return _mark([module for members in found.values() for module in members], flag), missing


def apply_leaf_modules(model: nn.Module, named: LeafModules) -> list[nn.Module]:
    """Have those be leaves that a configuration names, as far as the model has them."""
    found = _find(model, list(named.classes), False, add=True)
    by_name, unknown = set_z3_leaf_modules_by_name(model, named.names, raise_if_not_found=False)
    by_suffix, unmatched = set_z3_leaf_modules_by_suffix(model, named.name_suffixes, raise_if_not_found=False)
    if unknown or unmatched:
        _log.warning("zero_optimization.leaf_module names modules that the model has not: %s", unknown + unmatched)
    return _mark([*found, *by_name, *by_suffix], True)


def called_leaves(model: nn.Module) -> frozenset[nn.Module]:
    """The leaves in a model, and for lists of modules those that have them."""
    found = set()
    stack = [(model, model)]
    while stack:
        module, caller = stack.pop()
        called = caller if isinstance(module, _LISTS) else module
        if module in _leaves:
            found.add(called)
        stack.extend((child, called) for child in module.children())
    return frozenset(found)


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
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in classes)]
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {model}")
    return _mark(found, add)


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    own = type(module)
    if isinstance(kind, str):
        return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return issubclass(own, kind)
