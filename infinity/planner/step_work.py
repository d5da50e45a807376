"""The work of a step for every part of a machine, in seconds of units and tiles: a plan's bytes divided by the rates.

[Note: fewer tiles]
A trillion parameters are a million equal tiles. If there are many, several are merged into one, and the ring has fewer
slots in proportion, but always enough to overlap reads, updates and writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from infinity.config import Config
from infinity.planner.rates import Duplex, Rates
from infinity.planner.traffic import fetched, written
from infinity.planner.training_plan import TrainingPlan
from infinity.planner.work import Pass, Work
from infinity.schedule import Plan
from infinity.schedule.needs import cut_into_tiles
from infinity.tiers import Memory
from infinity.zero.updates import UpdateSchedule

_MOST_TILES = 400  # tiles that are simulated separately
_LEAST_SLOTS = 4
_ASIDE_RATE = 0.75  # rate of an update that fills the undo log, relative to one without it
_DRIVES = (Memory.NVME, Memory.FILE)


@dataclass(frozen=True)
class TileWork:
    """Seconds for one tile of optimizer states, each as if alone; 0 for reads and writes if it stays in memory.

    Attributes:
        params_s: to write the updated parameters.
    """

    update_s: float
    read_s: float = 0.0
    write_s: float = 0.0
    params_s: float = 0.0

    @property
    def is_stored(self) -> bool:
        return self.read_s > 0.0


@dataclass(frozen=True)
class UnitWork:
    """The work of one unit, in seconds as if alone, and its memory.

    Attributes:
        nbytes: of its parameters; 0 if they are never evicted.
        read_s, up_s: to fetch them from the drives, and to the device.
        gather_s: to gather it from the shards of several ranks, for a use.
        grad_bytes: of its gradients in the memory where they wait; 0 if they spill.
        own_grads: that memory is the unit's own.
        spill_s: to write or read the gradients of a unit that spills.
        take_s: for the compute thread to copy a pass's gradients to where they wait.
        reduce_s, down_s: to reduce a pass's gradients over the ranks, and to bring them from the device.
        publish_s, regather_s: to upload updated parameters that stay on the device, or to gather them on all ranks.
        tiles: of its optimizer states.
        undo_bytes: of the undo log, which a speculative update of all tiles takes.
        unlogged: number of tiles that a speculative update can have without room in the undo log.
        reconstructs: its gradients need no memory after that, because they can be reconstructed.
    """

    nbytes: int = 0
    read_s: float = 0.0
    up_s: float = 0.0
    gather_s: float = 0.0
    grad_bytes: int = 0
    own_grads: bool = False
    spill_s: float = 0.0
    take_s: float = 0.0
    reduce_s: float = 0.0
    down_s: float = 0.0
    publish_s: float = 0.0
    regather_s: float = 0.0
    tiles: tuple[TileWork, ...] = ()
    undo_bytes: int = 0
    unlogged: int = 0
    reconstructs: bool = False


@dataclass(frozen=True)
class UseWork:
    """A module that uses a unit, in each pass: seconds to compute, and to move its activations.

    Attributes:
        down_s, up_s: from the device and back.
        write_s, read_s: from host memory and back.
    """

    unit: int
    forward_s: float
    backward_s: float
    down_s: float = 0.0
    up_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """A step.

    Attributes:
        uses: in the order of a forward pass; backward is the reverse.
        plan: of the units that are fetched and evicted.
        params_bytes, grads_bytes: memory for these units, and for gradients that wait.
        undo_bytes: size of the undo log.
        speculates: updates are speculative.
        slots: of the ring of tiles.
        spill_slots: how many units that may spill have gradients in memory at once.
        passes: forward and backward passes.
        runs_in_backward: units are updated as soon as their gradients are final.
        waits_for_updates: a step ends when everything is updated.
        writes_all: every update is written home.
    """

    units: tuple[UnitWork, ...]
    uses: tuple[UseWork, ...]
    plan: Plan
    params_bytes: int
    grads_bytes: int
    slots: int
    spill_slots: int = 0
    undo_bytes: int = 0
    speculates: bool = False
    passes: int = 1
    runs_in_backward: bool = True
    waits_for_updates: bool = False
    writes_all: bool = False


def step_work(plan: TrainingPlan, config: Config, work: Work, rates: Rates) -> StepWork:
    """Return the work of a step of `plan` with micro-batches of `work`, on one of the machines of these rates."""
    sizing, schedule = plan.sizing, plan.sizing.schedule
    micro = config.gradient_accumulation_steps
    passes = 1 if sizing.layer_major else micro
    slots = plan.split.ring_bytes // plan.needs.tile_bytes
    tiles = list(_tiles(plan))
    together = -(-sum(map(len, tiles)) // _MOST_TILES)
    seconds = _Seconds(plan, rates, passes)
    spilled = set(plan.placement.grad_homes.spilled)
    units = []
    for unit in range(len(plan.units)):
        fewer = _fewer([seconds.tile(unit, numel, home) for numel, home in tiles[unit]], together)
        undo_bytes, unlogged = _old_values(plan, unit, fewer, tiles[unit])
        units.append(seconds.unit(unit, fewer, undo_bytes, unlogged, spills=unit in spilled))
    return StepWork(
        units=tuple(units),
        uses=tuple(_uses(plan, config, work, rates, micro // passes)),
        plan=plan.steps,
        params_bytes=plan.params_bytes,
        grads_bytes=plan.split.grads_bytes,
        slots=max(min(slots, _LEAST_SLOTS), slots // together) if together else 0,
        spill_slots=plan.placement.grad_homes.slots,
        undo_bytes=plan.split.images_bytes,
        speculates=schedule is UpdateSchedule.SPECULATIVE,
        passes=passes,
        runs_in_backward=schedule is UpdateSchedule.BACKWARD,
        waits_for_updates=schedule is UpdateSchedule.BARRIER or sizing.rules.waits_for_updates,
        writes_all=sizing.writes_updates,
    )


# Tiles #


def _tiles(plan: TrainingPlan) -> Iterator[list[tuple[int, Memory]]]:
    """Yield elements and homes of every unit's tiles, except tiles on the device: its updates take less time than the
    launches of a step."""
    shards = plan.sizing.shards
    for numel, homes in zip(shards.numels, plan.placement.tiles, strict=True):
        tiles = zip(cut_into_tiles([numel], shards.tile_numel), homes, strict=True)
        yield [(elements, home) for elements, home in tiles if home is not Memory.DEVICE]


def _fewer(tiles: Sequence[TileWork], together: int) -> tuple[TileWork, ...]:
    """Merge tiles, see [Note: fewer tiles]; tiles that stay in memory and tiles on NVMe separately."""
    if together <= 1:
        return tuple(tiles)
    groups: dict[bool, list[TileWork]] = {True: [], False: []}
    made: list[TileWork] = []
    for tile in tiles:
        group = groups[tile.is_stored]
        group.append(tile)
        if len(group) == together:
            made.append(_as_one(group))
            group.clear()
    return (*made, *(_as_one(group) for group in groups.values() if group))


def _as_one(tiles: Sequence[TileWork]) -> TileWork:
    return TileWork(
        sum(tile.update_s for tile in tiles),
        sum(tile.read_s for tile in tiles),
        sum(tile.write_s for tile in tiles),
        sum(tile.params_s for tile in tiles),
    )


def aside(tile: TileWork) -> TileWork:
    """Return the tile with the cost of a speculative update: one in memory also fills the undo log."""
    return tile if tile.is_stored else replace(tile, update_s=tile.update_s / _ASIDE_RATE)


def _old_values(
    plan: TrainingPlan, unit: int, fewer: Sequence[TileWork], tiles: Sequence[tuple[int, Memory]]
) -> tuple[int, int]:
    """Return `undo_bytes` and `unlogged` of a unit. Tiles in memory need room in the undo log; so do the parameters,
    unless they have slots or the states on NVMe can reconstruct them."""
    sizing = plan.sizing
    if sizing.keeps_steps:
        return 0, len(fewer)
    logged = [numel for numel, home in tiles if home is Memory.HOST or not sizing.is_double_buffered]
    unlogged = sum(tile.is_stored for tile in fewer) if sizing.is_double_buffered else 0
    undo_bytes = sum(map(sizing.layout.tile_bytes, logged))
    reconstructs = not logged and sizing.rules.grads.reconstructs
    if not reconstructs and not (sizing.is_double_buffered and plan.placement.params[unit] is Memory.NVME):
        undo_bytes += sum(numel for numel, _ in tiles) * sizing.specs[unit].dtype.itemsize
        unlogged = 0  # all tiles or none
    return undo_bytes, unlogged


# Units #


class _Seconds:
    """Times of one rank's transfers and updates, on a machine whose drives and cores its neighbours share."""

    def __init__(self, plan: TrainingPlan, rates: Rates, passes: int) -> None:
        self._plan = plan
        self._neighbours = plan.machine.neighbours
        self._rates = rates
        self._reads, self._writes = _ways(rates.disk)
        self._up, self._down = _ways(rates.link)
        self._passes = passes
        traffic, shards = plan.traffic, plan.sizing.shards
        self._fetched = set(fetched(plan.steps))
        self._written = written(plan.sizing, plan.steps)
        self._own_grads = set(plan.placement.grad_homes.own)
        self._trained = max(1, sum(unit.trainable_numel for unit in plan.sizing.partition.units))
        self._leaving = max(1, sum(shards.grad_sizes))
        self._whole = max(1, sum(spec.nbytes for spec in plan.sizing.specs if not spec.offloaded))
        self._reduced = (traffic.reduced + traffic.averaged) / passes

    def unit(self, unit: int, tiles: tuple[TileWork, ...], undo_bytes: int, unlogged: int, *, spills: bool) -> UnitWork:
        plan, rates, traffic, sizing = self._plan, self._rates, self._plan.traffic, self._plan.sizing
        spec, grads = sizing.specs[unit], sizing.shards.grad_sizes[unit]
        moves, shard = spec.offloaded, spec.shard_nbytes
        others = (spec.sharding.count - 1) / spec.sharding.count
        trained = sizing.partition.units[unit].trainable_numel
        stays = not plan.machine.discrete or unit in self._fetched or unit in sizing.on_device
        return UnitWork(
            nbytes=spec.nbytes if moves else 0,
            read_s=self._read(shard) if moves and plan.placement.params[unit] in _DRIVES else 0.0,
            up_s=_over(shard, self._up) if moves and not spec.has_device_shard and plan.machine.discrete else 0.0,
            gather_s=_over(spec.nbytes * others, rates.gather_bytes_per_s) if moves else 0.0,
            grad_bytes=0 if spills else grads,
            own_grads=unit in self._own_grads,
            take_s=self._take(trained),
            spill_s=(self._read(grads) + self._write(grads)) / 2 if spills else 0.0,
            reduce_s=_over(self._reduced * trained / self._trained, rates.reduce_bytes_per_s),
            down_s=_over(traffic.link_down / self._passes * grads / self._leaving, self._down),
            publish_s=0.0 if stays else _over(shard, self._up),
            regather_s=0.0
            if moves
            else _over(traffic.regathered * spec.nbytes / self._whole, rates.gather_bytes_per_s),
            tiles=tiles,
            undo_bytes=undo_bytes,
            unlogged=unlogged,
            reconstructs=sizing.rules.grads.reconstructs and spills and unlogged == len(tiles),
        )

    def tile(self, unit: int, numel: int, home: Memory) -> TileWork:
        sizing = self._plan.sizing
        nbytes = sizing.layout.tile_bytes(numel)
        stored, written = home is Memory.NVME, unit in self._written
        params = self._plan.placement.params[unit] is Memory.NVME
        return TileWork(
            _over(numel * self._neighbours, self._rates.optimizer_params_per_s),
            self._read(nbytes) if stored else 0.0,
            self._write(nbytes) if stored else 0.0,
            self._write(numel * sizing.specs[unit].dtype.itemsize) if params and written else 0.0,
        )

    def _take(self, numel: int) -> float:
        """Return the time to copy gradients in the first pass of a step, and to add them in the others; 0 with a
        device, whose link does it."""
        if self._plan.machine.discrete:
            return 0.0
        sizing = self._plan.sizing
        arrived, summed = sizing.layout.param_dtype.itemsize, sizing.grad_dtype.itemsize
        nbytes = arrived + summed + summed * (self._passes - 1) / self._passes
        return _over(numel * nbytes * self._neighbours, self._rates.memory_bytes_per_s)

    def _read(self, nbytes: int) -> float:
        return _over(nbytes * self._neighbours, self._reads)

    def _write(self, nbytes: int) -> float:
        return _over(nbytes * self._neighbours, self._writes)


def _ways(duplex: Duplex | None) -> tuple[float | None, float | None]:
    return (None, None) if duplex is None else (duplex.inward, duplex.outward)


def _over(amount: float, rate: float | None) -> float:
    """Return seconds; 0 if the rate is unknown."""
    return amount / rate if rate else 0.0


# Uses #


def _uses(plan: TrainingPlan, config: Config, work: Work, rates: Rates, together: int) -> Iterator[UseWork]:
    """Yield the uses. Blocks share their computation in proportion to their parameters; the last module outside gets
    the remaining computation.

    Args:
        together: micro-batches that go through a module in one pass.
    """
    share = 1 if plan.machine.discrete else plan.machine.neighbours
    numels = [plan.units[use.unit].params if use.in_block else 0 for use in plan.uses]
    if not sum(numels):
        numels = [plan.units[use.unit].params for use in plan.uses]
    last = max((index for index, use in enumerate(plan.uses) if not use.in_block), default=len(plan.uses) - 1)
    saved, stored = _activations(plan, config, work)
    (reads, writes), (up, down) = _ways(rates.disk), _ways(rates.link)

    def computed(whole: Pass, outside: Pass, part: float, *, is_last: bool) -> float:
        apart = rates.compute_s(outside) or 0.0
        inside = (rates.compute_s(whole) or 0.0) - apart
        return share * together * (part * inside + (apart if is_last else 0.0))

    for index, use in enumerate(plan.uses):
        part, is_last = numels[index] / max(1, sum(numels)), index == last
        yield UseWork(
            use.unit,
            computed(work.forward, work.outside_forward, part, is_last=is_last),
            computed(work.backward, work.outside_backward, part, is_last=is_last),
            down_s=_over(part * saved * together, down),
            up_s=_over(part * saved * together, up),
            write_s=_over(part * stored * together * plan.machine.neighbours, writes),
            read_s=_over(part * stored * together * plan.machine.neighbours, reads),
        )


def _activations(plan: TrainingPlan, config: Config, work: Work) -> tuple[float, float]:
    """Return a micro-batch's activation bytes that leave the device, and the part that leaves the host, too."""
    host_bytes = plan.sizing.rules.activations_bytes
    if not host_bytes:
        return 0.0, 0.0
    at_once = config.gradient_accumulation_steps if plan.sizing.layer_major else 1
    stored = (
        max(0.0, work.saved_bytes * at_once - host_bytes) / at_once if config.tiering.activations == "nvme" else 0.0
    )
    return (work.saved_bytes if plan.machine.discrete else 0.0), stored
