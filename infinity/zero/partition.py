"""Divide the parameters into units, and lay out each unit's flat tensor. Pure layout.

By default a unit is one transformer block: a module of a class that the model declares indivisible (transformers'
`_no_split_modules`), else a child of the outermost containers (`ModuleList`, `Sequential`, `ModuleDict`). A module
outside of them with parameters of its own (an embedding, a head) is a unit, too. So is each tile of a `TiledLinear`, in
a block or not, and each part of a block that is too large (see unit_modules.py). Small parameters, up to the
persistence threshold, stay resident in one further unit, because moving them one by one costs more than holding them.

Frozen parameters that stay in the user's files are in a separate unit of their module. This unit is never written, and
its flat tensor is an image of the files (see infinity/tiers/weight_files.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim.formats import SHARD_ALIGN
from infinity.tiers import WHOLE, FileRun, Sharding, StoredTensor, lay_out_image, overlap
from infinity.tiers.state_layout import StateLayout
from infinity.zero.model_parts import has_numbers, local_part
from infinity.zero.unit_modules import UnitModule, unit_modules

PERSISTENT = "persistent"
IN_FILES = " (in its files)"  # suffix of the module's name


@dataclass(frozen=True)
class Alignment:
    """The alignment of positions in a flat tensor, in elements.

    Attributes:
        shard: of shard lengths.
        param: of parameter starts; by default a cache line in any dtype of two bytes or more.
    """

    shard: int
    param: int = 32

    @staticmethod
    def of(layout: StateLayout) -> Alignment:
        return Alignment(SHARD_ALIGN, max(Alignment.param, *(field.block for field in layout.fields)))

    def for_ranks(self, count: int) -> Alignment:
        """Return the alignment for units sharded over so many ranks."""
        return Alignment(self.shard * count, self.param)


@dataclass(frozen=True)
class ParamInfo:
    """One parameter's position in its unit's flat tensor.

    Attributes:
        name: qualified name in the model (the first one, for tied parameters).
        shape: its shape; `numel` elements starting at `offset` of the flat tensor.
        trainable: whether it has a gradient, optimizer states and a parameter group.
        group: index of its parameter group; -1 if not trainable.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    trainable: bool
    group: int


@dataclass(frozen=True)
class UnitLayout:
    """The layout of a unit: parameters that are fetched, used and evicted together.

    Attributes:
        params: trainable parameters first, by group, then frozen ones.
        trainable_numel: padded length of the trainable part, whose shards the optimizer updates.
        numel: padded length of the flat tensor.
        persistent: always resident.
        runs: the file ranges of which it is an image; empty for other units.
    """

    index: int
    name: str
    params: tuple[ParamInfo, ...]
    trainable_numel: int
    numel: int
    persistent: bool
    runs: tuple[FileRun, ...] = ()

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return sum(info.trainable for info in self.params)

    def parts(
        self, sharding: Sharding, start: int = 0, stop: int | None = None, *, of: ParamInfo | None = None
    ) -> Iterator[ParamPart]:
        """Yield the parts of parameters in elements `[start, stop)` of a shard; with `of`, only that parameter's."""
        for own in sharding.pieces(self.trainable_numel, self.numel):
            low = max(start, own.shard)
            high = own.shard + own.numel if stop is None else min(stop, own.shard + own.numel)
            for info in self.params if of is None else (of,):
                part = overlap(own, info.offset, info.offset + info.numel)
                if part is None:
                    continue
                first, last = max(low, part.shard), min(high, part.shard + part.numel)
                if first < last:
                    yield ParamPart(info, first, last, part.whole - info.offset + first - part.shard)


@dataclass(frozen=True)
class ParamPart:
    """Consecutive elements of one parameter in a shard.

    Attributes:
        start, stop: their position in the shard.
        offset: position of the first of them in the parameter.
    """

    info: ParamInfo
    start: int
    stop: int
    offset: int

    @property
    def shard(self) -> slice:
        """The elements in the shard."""
        return slice(self.start, self.stop)

    @property
    def param(self) -> slice:
        """The elements in the flat parameter."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class HookPoint:
    """A module, and the units of the parameters that its forward uses.

    Attributes:
        moving: whether one of the units can be evicted, or has gradients that are reduced when backward leaves the
            module. If False, a use only waits for updates.
        in_block: whether the module is a block or inside of one.
    """

    module_name: str
    units: tuple[int, ...]
    moving: bool
    in_block: bool


@dataclass(frozen=True)
class Partition:
    """The units of a model and the modules that use them.

    Attributes:
        sharding: this rank's slice of each unit.
        blocks: modules that form the model's sequence of blocks, in definition order.
    """

    units: tuple[UnitLayout, ...]
    hook_points: tuple[HookPoint, ...]
    sharding: Sharding = WHOLE
    blocks: tuple[str, ...] = ()

    @property
    def shared(self) -> frozenset[int]:
        users = Counter(unit for point in self.hook_points for unit in point.units)
        return frozenset(unit for unit, count in users.items() if count > 1)

    def parts(
        self, unit: UnitLayout, start: int = 0, stop: int | None = None, *, of: ParamInfo | None = None
    ) -> Iterator[ParamPart]:
        """See `UnitLayout.parts`; for this rank's shard."""
        return unit.parts(self.sharding, start, stop, of=of)


def make_partition(
    model: nn.Module,
    groups: Mapping[str, int],
    *,
    align: Alignment,
    persistence_threshold: int,
    offloaded: bool,
    sharding: Sharding = WHOLE,
    watched: bool = False,
    in_files: Mapping[str, StoredTensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    limit_numel: int | None = None,
    leaves: Set[nn.Module] = frozenset(),
) -> Partition:
    """Partition a model's floating-point parameters.

    Args:
        groups: parameter group of every trained parameter, by name.
        persistence_threshold: parameters outside of blocks with at most this many elements stay resident.
        offloaded: parameters have a home below the device; if False, every unit is persistent.
        sharding: this rank's slice of each unit.
        watched: hooks follow every use, also of units that stay.
        in_files: frozen parameters that stay in the user's files, with their places; the files have them in `dtype`.
        limit_numel: blocks of more elements are cut into units of their parts.
        leaves: modules that are gathered whole.

    Raises:
        ConfigError: the model has no floating-point parameters, or one cannot stay in its file.
    """
    align, in_files = align.for_ranks(sharding.count), in_files or {}
    params = {name: p for name, p in model.named_parameters() if has_numbers(p)}  # the first name of tied parameters
    if not params:
        raise ConfigError("the model has no floating-point parameters to train or place")
    names = {id(p): name for name, p in params.items()}
    shapes = {name: tuple(local_part(p).shape) for name, p in params.items()}
    members: dict[str, list[str]] = {}  # unit name -> its parameters
    unit_of: dict[str, str] = {}  # parameter -> unit name
    uses: list[tuple[UnitModule, list[str]]] = []  # module -> the parameters that its forward uses
    modules = list(unit_modules(model, limit_numel, leaves))
    for part in modules:
        used = list(dict.fromkeys(names[id(p)] for p in part.parameters() if id(p) in names))
        for name in used:
            if name in unit_of:
                continue  # tied to a parameter of an earlier module
            is_small = not part.whole and math.prod(shapes[name]) <= persistence_threshold
            apart = IN_FILES if name in in_files else ""
            unit_of[name] = PERSISTENT if is_small else part.name + apart
            members.setdefault(unit_of[name], []).append(name)
        uses.append((part, used))
    order = sorted(members, key=lambda unit_name: unit_name == PERSISTENT)  # stable; the persistent one last
    units: list[UnitLayout] = []
    for index, unit_name in enumerate(order):
        in_order = sorted(members[unit_name], key=lambda name: groups.get(name, 1 << 30))  # stable in a group
        of_unit = {name: shapes[name] for name in in_order}
        if unit_name.endswith(IN_FILES):
            units.append(_layout_in_files(index, unit_name, of_unit, in_files, dtype, align))
            continue
        persistent = not offloaded or unit_name == PERSISTENT
        units.append(lay_out_unit(index, unit_name, of_unit, groups, align, persistent=persistent))
    index_of = {unit.name: unit.index for unit in units}
    hook_points = []
    blocks = tuple(part.name for part in modules if part.is_block)
    for part, used in uses:
        needed = tuple(sorted({index_of[unit_of[name]] for name in used}))
        moving = bool(needed) and (watched or any(not units[i].persistent for i in needed))
        hook_points.append(HookPoint(part.name, needed, moving, part.in_block))
    return Partition(tuple(units), tuple(hook_points), sharding, blocks)


def lay_out_unit(
    index: int,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    groups: Mapping[str, int],
    align: Alignment,
    *,
    persistent: bool,
) -> UnitLayout:
    """Lay out the unit of these parameters, in their order but trained ones first.

    Args:
        shapes: by parameter name.
        groups: parameter group of every trained parameter.
        align: of shards, for all ranks together.
    """
    infos: list[ParamInfo] = []
    offset = 0
    trainable_numel = 0
    for member, shape in shapes.items():
        numel, trainable = math.prod(shape), member in groups
        if not trainable and (not infos or infos[-1].trainable):
            trainable_numel = offset = _round_up(offset, align.shard)
        infos.append(ParamInfo(member, shape, numel, offset, trainable, groups.get(member, -1)))
        offset += _round_up(max(1, numel), align.param)  # a unit of only empty parameters has a tile, too
    padded = _round_up(offset, align.shard)
    if all(info.trainable for info in infos):
        trainable_numel = padded
    return UnitLayout(index, name, tuple(infos), trainable_numel, padded, persistent)


def _layout_in_files(
    index: int,
    name: str,
    shapes: Mapping[str, tuple[int, ...]],
    in_files: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    align: Alignment,
) -> UnitLayout:
    """Lay out a unit that is an image of files.

    Raises:
        ConfigError: a parameter is stored in another dtype than the model computes in, not aligned to its element size,
            or of another size.
    """
    itemsize = dtype.itemsize
    for member, shape in shapes.items():
        tensor = in_files[member]
        if tensor.dtype is not dtype:
            here, there = (str(each).removeprefix("torch.") for each in (dtype, tensor.dtype))
            raise ConfigError(
                f"`{member}` cannot be read in place: {tensor.file.path} has it in {there}, and the model "
                f"computes in {here}. Store the weights in {here}, or read them with in_place=False"
            )
        if tensor.start % itemsize or tensor.nbytes != math.prod(shape) * itemsize:
            raise ConfigError(
                f"`{member}` cannot be read in place: {tensor.file.path} has {tensor.nbytes} bytes of it from "
                f"byte {tensor.start}, and the model wants {math.prod(shape)} elements of {itemsize}. Read the weights "
                "with in_place=False"
            )
    starts, runs = lay_out_image([in_files[member] for member in shapes])
    infos = [
        ParamInfo(member, shape, math.prod(shape), start // itemsize, trainable=False, group=-1)
        for (member, shape), start in zip(shapes.items(), starts, strict=True)
    ]
    infos.sort(key=lambda info: info.offset)
    numel = _round_up(sum(run.nbytes for run in runs) // itemsize, align.shard)
    return UnitLayout(index, name, tuple(infos), 0, numel, persistent=False, runs=runs)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
