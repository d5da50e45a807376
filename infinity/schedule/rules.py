"""Resolve a configuration, once: which memory is the home of each kind of value, for all units alike.

[Note: placement]
Three facts of a run decide the placement: its stage, its offload sections, and its compute device.

- If the compute device is the CPU, device and host are one memory, and `none` and `cpu` mean the same.
- A shard is *separate* from the unsharded tensor that the model computes on if the device has memory of its own, or if
  several ranks share the tensor. The optimizer then updates the shard, in host memory. Otherwise it updates the tensor
  itself.
- If states are on the device, the device also updates the parameters. At stages 0 to 2, and on one rank, it updates the
  shard's place in the tensor, which stays on the device. At stage 3 on several ranks, unsharded tensors are freed, so
  the device has a SHARD copy in addition, and updates it.
- Fields that are divided among ranks (at every stage but 0) have their home in shards. At stages 1 and 2, unsharded
  parameters stay; at stage 3 they are gathered from shards. With `communication.shard_size`, the ranks form groups:
  the ranks of a group divide the states, and every group has all states.

`Rules` contains these facts for all units. `place` in placement.py then moves fields that exceed the divided budget to
NVMe, tile by tile and unit by unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from infinity.config import Config, NvmeConfig
from infinity.errors import ConfigError
from infinity.schedule.on_device import first_to_stay, may_fill, share_on_device
from infinity.tiers import FlatSpec, Memory, Sharding

_DEVICE_TILE_BYTES = 64 << 20
_AHEAD_NUMEL = 50_000_000  # gathered early, beyond the next unit: the default of stage3_prefetch_bucket_size
_DRIVE_COPIES = 3  # two slots, and a checkpoint


@dataclass(frozen=True)
class ParamRules:
    """Rules for parameters.

    Attributes:
        home: home of the parameters that can be evicted; DEVICE if none can.
        home_on_device: home of the parameters whose states are on the device.
        gathers: whether units are gathered from the shards of several ranks.
        ahead_numel: elements of units that are gathered early, beyond the next one.
        pass_host: whether to read parameters from the drives directly into device memory, if possible.
    """

    home: Memory
    home_on_device: Memory
    gathers: bool
    ahead_numel: int
    pass_host: bool


@dataclass(frozen=True)
class GradRules:
    """Rules for gradients.

    Attributes:
        reduces: whether gradients are summed over several ranks.
        reduces_every_pass: whether this happens in every backward pass, and not only in the last one of a step.
        collects_all: whether every rank holds the full gradients of all units at once before the reduction.
        holds_all: whether this rank holds the gradients of all units at once, in memory or on NVMe.
        spills: whether gradients that exceed host memory go to NVMe.
        reconstructs: whether gradients of units whose states are all double-buffered on NVMe need no memory after
            speculative updates, because they can be reconstructed.
        stream: whether a unit's gradients leave the device during the computation, unless they are added to other
            gradients on the host.
        sums_on_device: whether gradients of several micro-batches are summed on the device, as far as it has memory,
            and downloaded once.
        sums_once: whether each rank keeps the sum of its group's gradients over a step, as far as there is memory, so
            that replicas exchange it once a step.
    """

    reduces: bool
    reduces_every_pass: bool
    collects_all: bool
    holds_all: bool
    spills: bool
    reconstructs: bool
    stream: bool
    sums_on_device: bool
    sums_once: bool

    def parts(self, params: int) -> int:
        """Return the number of parts in which the gradients of a unit with this many parameters arrive.

        Each parameter is a part; if ranks reduce the gradients, the unit is one part.
        """
        return 1 if self.reduces else params


@dataclass(frozen=True)
class StateRules:
    """Rules for optimizer states.

    Attributes:
        home: DEVICE if states and gradients never leave the device.
        share_on_device: share of the states that is on the device, in whole units. The other states are in `home`.
        fills: whether spare device memory is filled with states of further units after the first step.
        keeps_steps: whether each finished step stays on NVMe. Fields in host memory then also have a place on NVMe.
        least_tile_bytes: minimum size of a tile, because smaller ones are not worth a kernel launch on a device.
    """

    home: Memory
    share_on_device: float
    fills: bool
    keeps_steps: bool
    least_tile_bytes: int


@dataclass(frozen=True)
class Rules:
    """Rules for all units alike, see [Note: placement].

    Attributes:
        sharding: this rank's slice of a unit's states, gradients, and shards of parameters.
        replicas: number of ranks with the same slice.
        update_memory: the memory in which the optimizer updates parameters: HOST for a separate shard, DEVICE for the
            tensor that the model computes on.
        one_memory: whether device and host are one memory, for which the host's budget pays.
        stage: ZeRO stage; 0 with one rank.
        waits_for_updates: whether `step()` returns only when all parameters are updated and shown. If False, updates
            continue under the next forward.
        drives: the drives in use.
        activations_bytes: host memory for activations; 0 if they stay on the device.
    """

    params: ParamRules
    grads: GradRules
    states: StateRules
    sharding: Sharding
    replicas: int
    update_memory: Memory
    one_memory: bool
    stage: int
    waits_for_updates: bool
    drives: tuple[NvmeConfig, ...]
    activations_bytes: int

    @property
    def stay_by_units(self) -> bool:
        """Whether states stay in memory by whole units, see `place_units`."""
        return self.grads.reconstructs and not self.states.keeps_steps

    def with_reconstruction(self, *, params: bool) -> Rules:
        """Return these rules for speculative updates after which gradients of units on NVMe can be reconstructed.

        Args:
            params: whether parameters can be reconstructed, too, so that they need no slots of their own.
        """
        on_drives = self.states.home is Memory.NVME and (params or self.params.home is Memory.NVME)
        return replace(self, grads=replace(self.grads, reconstructs=self.grads.spills and on_drives))

    def param_home(self, *, stays: bool, updated_on_device: bool) -> Memory:
        """Return the home of a unit's parameters. If it is NVMe, the budget may still move the parameters to the host.

        Args:
            stays: whether the parameters never leave the device.
            updated_on_device: whether the unit's states are on the device.
        """
        return Memory.DEVICE if stays else self.params.home_on_device if updated_on_device else self.params.home

    def stored_param_bytes(self, specs: Sequence[FlatSpec]) -> int:
        """Return the most bytes that this rank's parameters take on NVMe, without parameters in the user's files."""
        on_drives = self.params.home is Memory.NVME
        return sum(spec.shard_nbytes for spec in specs if on_drives and spec.offloaded and not spec.runs)

    def first_to_stay(
        self, first: Sequence[int], numels: Sequence[int], bytes_per_param: int, free_bytes: int
    ) -> frozenset[int]:
        """Return units whose parameters stay on the device so that their states can move to it; see `first_to_stay`."""
        return first_to_stay(first, numels, bytes_per_param, free_bytes) if self.states.fills else frozenset()

    def measured_on_device(self, parts: int) -> int:
        """Return for how many of `parts` parts of units the device measures the gradient norm: all or none."""
        return parts if self.grads.stream or self.states.share_on_device else 0

    def in_place_problem(self) -> str:
        """Return why frozen weights cannot be used in the user's files; empty if they can."""
        if self.params.home is Memory.NVME:
            return ""
        return (
            "weights cannot be read in place, because this configuration keeps parameters in memory: set "
            'zero_optimization.stage to 3 and zero_optimization.offload_param.device to "nvme", or pass in_place=False'
        )

    def no_sync_problem(self) -> str:
        """Return why a rank cannot hold the gradients of several passes before they are reduced; empty if it can."""
        if self.stage >= 2:
            return (
                f"no_sync keeps whole gradients on every rank, which stage {self.stage} avoids: leave it out, or use "
                "stage 0 or 1, which reduce gradients in the last micro-batch of a step anyway"
            )
        if not self.grads.reduces and not self.grads.holds_all:
            return (
                "no_sync keeps the gradients of all units, but the update schedule `backward` has memory for a few "
                "units only: set tiering.update_schedule to deferred, or gradient_accumulation_steps"
            )
        return ""


def rules_of(
    config: Config, rank: int, ranks: int, *, discrete: bool, exact: bool = True, updates_in_backward: bool
) -> Rules:
    """Resolve a configuration.

    Args:
        rank: number of this process among the `ranks` processes that train the model together.
        discrete: whether the compute device has memory of its own.
        exact: whether the state format has exact moments, which a device can update, too.
        updates_in_backward: whether a unit is updated as soon as its gradients are final.

    Raises:
        ConfigError: the ranks cannot be divided into groups of the configured size, or two keys contradict each other.
    """
    stage, params, states = config.zero.stage, config.zero.offload_param.device, config.zero.offload_optimizer.device
    sharing = config.zero.sharing(ranks)
    sharding = Sharding(rank % sharing, sharing)
    separate = discrete or sharding.count > 1
    layer_major = config.gradient_accumulation_steps > 1 and config.tiering.accumulation == "layer"
    summed = config.accumulates and not layer_major
    every_pass = stage >= 2 and not layer_major
    on_drives = "nvme" in (params, states)
    activations_move = config.tiering.activations == "nvme" or (config.tiering.activations == "cpu" and discrete)
    home_on_device = Memory.SHARD if stage == 3 and sharding.count > 1 else Memory.DEVICE
    may_be_on_device = states == "none" and discrete and exact
    if params == "nvme":
        home = Memory.NVME
    elif separate and (params == "cpu" or (home_on_device is Memory.SHARD and not may_be_on_device)):
        home = Memory.HOST
    else:
        home = home_on_device
    states_home = {"nvme": Memory.NVME, "cpu": Memory.HOST, "none": Memory.HOST}[states]
    share = share_on_device(config, discrete=discrete, exact=exact)
    if may_be_on_device and home is home_on_device:
        states_home, share = Memory.DEVICE, 1.0
    fills = states_home is not Memory.DEVICE and may_fill(config, ranks, discrete=discrete, exact=exact)
    asked_on_device = share > 0 or (fills and config.tiering.fill_device is True)
    streams = discrete and states_home is not Memory.DEVICE
    pass_host = config.aio.use_gds and discrete and home is Memory.NVME
    if config.tiering.crash_consistent and (share > 0 or fills):
        raise ConfigError(
            "tiering.crash_consistent needs updates in host memory, whose results it writes to the drives, but with "
            "offload_optimizer.device none, ratio below 1 or tiering.fill_device, states are updated on the device: "
            "set device to cpu or nvme, and leave the other two out"
        )
    if pass_host and config.tiering.checksum:
        raise ConfigError(
            "aio.use_gds reads past the host, but tiering.checksum needs the bytes in host memory: switch one of them "
            "off"
        )
    return Rules(
        params=ParamRules(
            home=home,
            home_on_device=home_on_device,
            gathers=sharding.count > 1,
            ahead_numel=_ahead_numel(config, discrete=discrete) if sharding.count > 1 else 0,
            pass_host=pass_host,
        ),
        grads=GradRules(
            reduces=ranks > 1,
            reduces_every_pass=every_pass,
            collects_all=ranks > 1 and summed and not every_pass,
            holds_all=summed or not updates_in_backward,
            spills=on_drives and (summed or not updates_in_backward),
            reconstructs=False,
            stream=streams,
            sums_on_device=streams and summed and (ranks == 1 or every_pass),
            sums_once=every_pass and summed and 1 < sharing < ranks,
        ),
        states=StateRules(
            home=states_home,
            share_on_device=share,
            fills=fills,
            keeps_steps=config.tiering.crash_consistent,
            # tiles on NVMe keep the size that is best for a drive
            least_tile_bytes=_DEVICE_TILE_BYTES if asked_on_device and states_home is not Memory.NVME else 0,
        ),
        sharding=sharding,
        replicas=ranks // sharing,
        update_memory=Memory.HOST if separate else Memory.DEVICE,
        one_memory=not discrete,
        stage=stage if ranks > 1 else 0,
        # At these stages, training loops read and write parameters between steps, as in torch.
        waits_for_updates=stage < 3 and config.tiering.update_schedule == "auto",
        drives=config.tiering.nvme if on_drives else (),
        activations_bytes=config.tiering.activation_memory_bytes if activations_move else 0,
    )


def _ahead_numel(config: Config, *, discrete: bool) -> int:
    """Return the configured number of elements. The default is 0 if the device has no memory of its own."""
    asked = config.zero.prefetch_numel
    return asked if asked is not None else _AHEAD_NUMEL if discrete else 0


def may_speculate(config: Config, ranks: int, *, discrete: bool) -> bool:
    """Whether speculative updates cost nothing.

    There are two cases. Either all fields that they change are double-buffered on NVMe anyway, and users do not read
    the fields between steps. Or everything is in memory, and the host's cores are idle while a device computes.
    """
    if not config.managed_accumulation:
        return False
    if config.tiering.crash_consistent:
        return config.zero.stage == 3
    in_memory = config.zero.offload_optimizer.device == "cpu" and config.zero.offload_param.device != "nvme"
    return _alone_with_device(ranks, discrete=discrete) and in_memory


def may_speculate_on_drives(
    config: Config, rules: Rules, ranks: int, *, slot_bytes: int, drive_bytes: Callable[[], int | None]
) -> bool:
    """Whether "auto" makes updates of units on NVMe speculative.

    True if their gradients need not be kept, and NVMe has room for a second slot and a checkpoint.

    Args:
        rules: the rules with speculative updates.
        slot_bytes: bytes of one slot of all fields that may be on NVMe.
        drive_bytes: returns the free space on the drives; None if it is unknown, and assumed to be enough.
    """
    chosen_here = config.tiering.update_schedule == "auto" and config.waits and config.managed_accumulation
    if not chosen_here or not rules.stay_by_units or not _alone_with_device(ranks, discrete=not rules.one_memory):
        return False
    free_bytes = drive_bytes()
    return free_bytes is None or _DRIVE_COPIES * slot_bytes <= free_bytes


def _alone_with_device(ranks: int, *, discrete: bool) -> bool:
    """Whether one rank computes on a device. The host's cores and drives are then idle while the device computes.

    Several ranks would have to exchange messages for each unit instead of once a step.
    """
    return discrete and ranks == 1
