"""Leaf modules: those whose parameters are gathered together. Here a transformer block is one, with all in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakSet

from torch import nn

from infinity.integrations.dialect.logs import logger

_leaves: WeakSet[nn.Module] = WeakSet()


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Note that these modules are leaves, which changes nothing: blocks are gathered whole in any case.

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
    """Note that one module is a leaf, or is none."""
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


def apply_leaf_module_section(model: nn.Module, section: Mapping[str, Any] | None) -> list[nn.Module]:
    """Note the leaves that a configuration names in `zero_optimization.leaf_module`, as far as the model has them."""
    if not isinstance(section, Mapping):
        return []

    def named(key: str) -> list[Any]:
        value = section.get(key) or []
        return [value] if isinstance(value, str) else list(value)

    found = _find(model, named("classes"), False, add=True)
    by_name, unknown = set_z3_leaf_modules_by_name(model, named("names"), raise_if_not_found=False)
    by_suffix, unmatched = set_z3_leaf_modules_by_suffix(model, named("name_suffixes"), raise_if_not_found=False)
    if unknown or unmatched:
        logger.warning("zero_optimization.leaf_module names modules that the model has not: %s", unknown + unmatched)
    return _mark([*found, *by_name, *by_suffix], True)


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
