"""Decide which modules of a model have units of their own, from the model's structure and sizes alone.

[Note: blocks that are cut]
A block that is not larger than a limit is one unit. If it is larger, its largest modules become units of their own.
Each of these is gathered for its own forward and backward, and is cut in the same way if it is still too large. The
remaining parameters (norms, parameters of the block itself) are the block's unit, which stays in memory while the block
runs. They are a small share of the limit if the modules allow it. The parameters of a single module are never divided;
`TiledLinear` does that. The cuts do not change the results. A leaf (leaf_modules.py) is never cut. It is one unit, also
outside of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import nn

from infinity.zero.model_parts import has_numbers, local_part
from infinity.zero.tiling import Tile

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REST_SHARE = 8  # the block's own unit should take at most 1/8 of the limit: it stays in memory while the block runs


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module that owns or uses units.

    Attributes:
        is_block: whether it is one of the modules of which the model is a sequence.
        in_block: whether it is one of these, or inside of one.
        whole: whether its unit contains all parameters of its subtree, also small ones. If False, its unit contains
            only the module's own parameters, and small ones stay in memory.
        apart: modules in the subtree that have units of their own.
    """

    name: str
    module: nn.Module
    is_block: bool = False
    in_block: bool = False
    whole: bool = False
    apart: frozenset[nn.Module] = frozenset()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the module, and of its subtree if `whole`, except those of the modules in `apart`."""
        if not self.whole:
            yield from self.module.parameters(recurse=False)
            return
        stack = [self.module]
        while stack:
            module = stack.pop()
            yield from module.parameters(recurse=False)
            stack.extend(child for child in reversed(list(module.children())) if child not in self.apart)


def unit_modules(model: nn.Module, limit_numel: int | None, leaves: Set[nn.Module]) -> Iterator[UnitModule]:
    """Yield the modules that own or use units, in the order of their definition.

    Args:
        limit_numel: blocks of more elements are cut, see [Note: blocks that are cut]; None for no limit.
        leaves: modules that are called, and gathered whole.
    """
    classes = {type(module).__name__ for module in model.modules()}
    indivisible = classes.intersection(getattr(model, "_no_split_modules", None) or ())
    stack: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, in_container = stack.pop()
        is_block = type(module).__name__ in indivisible if indivisible else in_container
        is_block |= isinstance(module, Tile)
        container = isinstance(module, _CONTAINERS)
        is_block = is_block and not container and any(True for _ in module.parameters())
        if is_block or module in leaves:
            yield from _of_block(name, module, limit_numel, leaves, is_block=is_block)
            continue
        yield UnitModule(name, module)
        prefix = f"{name}." if name else ""
        children = [(prefix + child_name, child, container) for child_name, child in module.named_children()]
        stack.extend(reversed(children))


def _of_block(
    name: str, block: nn.Module, limit_numel: int | None, leaves: Set[nn.Module], *, is_block: bool
) -> Iterator[UnitModule]:
    """Yield a block or a leaf, and the modules in it that have units of their own."""
    apart = frozenset(_apart(block, limit_numel, leaves))
    yield UnitModule(name, block, is_block=is_block, in_block=is_block, whole=True, apart=apart)
    for part_name, part in block.named_modules(prefix=name):
        if part is not block and part in apart:
            is_tile = isinstance(part, Tile)
            in_block = is_block or is_tile
            yield UnitModule(part_name, part, is_block=is_tile, in_block=in_block, whole=True, apart=apart)


def _apart(module: nn.Module, limit_numel: int | None, leaves: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules in the subtree that become units of their own."""
    tiles: set[nn.Module] = {part for part in module.modules() if part is not module and isinstance(part, Tile)}
    yield from tiles
    if limit_numel is None or module in leaves or _numel(module, tiles) <= limit_numel:
        return
    rest = _numel(module, tiles)
    candidates = [part for part in _parts(module) if part not in tiles]
    for part in sorted(candidates, key=lambda part: _numel(part, tiles), reverse=True):  # stable
        numel = _numel(part, tiles)
        if not numel or rest <= limit_numel // _REST_SHARE:
            return
        rest -= numel
        yield part
        yield from _apart(part, limit_numel, leaves)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module. In the place of a container, which is never called, yield its children."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        else:
            yield child


def _numel(module: nn.Module, without: set[nn.Module]) -> int:
    """Return the elements of the distinct floating-point parameters of a module, without the modules in `without`."""
    found = UnitModule("", module, whole=True, apart=frozenset(without - {module})).parameters()
    distinct = {id(param): param for param in found if has_numbers(param)}
    return sum(local_part(param).numel() for param in distinct.values())
