"""Leaf modules: those whose parameters are gathered together. Here a transformer block is one, with all in it."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

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


def _find(
    model: nn.Module, classes: list[type[nn.Module] | str], raise_if_not_found: bool, *, add: bool
) -> list[nn.Module]:
    if not all(isinstance(kind, (type, str)) for kind in classes):
        raise TypeError("leaf_module_classes must be classes, or names of classes")
    found = [module for module in model.modules() if any(_is_a(module, kind) for kind in classes)]
    for module in found:
        set_z3_leaf_module(module, add)
    if not found and raise_if_not_found:
        raise ValueError(f"No modules of type {classes} found in model {model}")
    return found


def _is_a(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    own = type(module)
    if isinstance(kind, str):
        return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return own is kind
