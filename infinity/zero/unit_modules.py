"""Which modules of a model have units of their own. Pure: of a model's structure and sizes.

[Note: blocks that are cut]
A block is one unit as long as it is no larger than a limit. Of a larger one, the largest modules in it become units of
their own, each gathered for its own forward and backward alone, and cut in the same way if it is still too large; what
is left (norms, parameters of the block itself) stays the block's unit, which is there while the block runs, and is kept
to a small share of the limit if the modules allow it. One module's own parameters are never divided: for those there is
`TiledLinear`. Nothing about the numbers follows from where a block is cut. A leaf (leaf_modules.py) is never cut, and
is one unit outside of blocks, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import nn

from infinity.zero.model_parts import has_numbers, local_part
from infinity.zero.tiling import Tile

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REST_SHARE = 8  # of the limit: what stays in memory while the modules of a block come and go takes no larger a part


@dataclass(frozen=True, eq=False)
class UnitModule:
    """A module that owns or uses units.

    Attributes:
        is_block: one of those that the model is a sequence of.
        whole: its unit has the parameters of its subtree, and small ones do not stay; else its own alone.
        apart: modules in the subtree that have units of their own.
    """

    name: str
    module: nn.Module
    is_block: bool = False
    whole: bool = False
    apart: frozenset[nn.Module] = frozenset()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those that its forward uses, but for what is apart."""
        if not self.whole:
            yield from self.module.parameters(recurse=False)
            return
        stack = [self.module]
        while stack:
            module = stack.pop()
            yield from module.parameters(recurse=False)
            stack.extend(child for child in reversed(list(module.children())) if child not in self.apart)


def unit_modules(model: nn.Module, limit_numel: int | None, leaves: Set[nn.Module]) -> Iterator[UnitModule]:
    """In definition order.

    Args:
        limit_numel: blocks of more elements are cut, see [Note: blocks that are cut]; None for no limit.
        leaves: modules that are called, and gathered whole.
    """
    indivisible = frozenset(getattr(model, "_no_split_modules", None) or ())
    if not any(type(module).__name__ in indivisible for module in model.modules()):
        indivisible = frozenset()
    stack: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, in_container = stack.pop()
        is_block = type(module).__name__ in indivisible if indivisible else in_container
        is_block |= isinstance(module, Tile)
        container = isinstance(module, _CONTAINERS)
        if is_block and not container and any(True for _ in module.parameters()):
            yield from _of_block(name, module, limit_numel, leaves)
            continue
        if module in leaves:
            yield from _of_block(name, module, None, leaves, is_block=False)
            continue
        yield UnitModule(name, module)
        prefix = f"{name}." if name else ""
        children = [(prefix + child_name, child, container) for child_name, child in module.named_children()]
        stack.extend(reversed(children))


def _of_block(
    name: str, block: nn.Module, limit_numel: int | None, leaves: Set[nn.Module], *, is_block: bool = True
) -> Iterator[UnitModule]:
    """A block, and what is apart of it."""
    apart = frozenset(_apart(block, limit_numel, leaves))
    yield UnitModule(name, block, is_block=is_block, whole=True, apart=apart)
    for part_name, part in block.named_modules(prefix=name):
        if part is not block and part in apart:
            yield UnitModule(part_name, part, is_block=isinstance(part, Tile), whole=True, apart=apart)


def _apart(module: nn.Module, limit_numel: int | None, leaves: Set[nn.Module]) -> Iterator[nn.Module]:
    """Modules in the subtree that are to be units of their own."""
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
    """The modules that it calls: its children, and those of containers, which are not called, in their place."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        else:
            yield child


def _numel(module: nn.Module, without: set[nn.Module]) -> int:
    """Elements of its distinct floating-point parameters, but for those of some modules."""
    found = UnitModule("", module, whole=True, apart=frozenset(without - {module})).parameters()
    distinct = {id(param): param for param in found if has_numbers(param)}
    return sum(local_part(param).numel() for param in distinct.values())
