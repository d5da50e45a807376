"""Compute how much of each memory and of the drives a run may use, and into which units its blocks are cut to fit."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from infinity.config import Config, format_size, size_to_set
from infinity.errors import CapacityError
from infinity.memory import Budget, Ledger, available_memory_bytes
from infinity.schedule import MemoryNeeds, MemorySplit, advice_on_unit
from infinity.schedule.needs import room_advice
from infinity.tiers.swap_file import remove_stale
from infinity.zero.ranks import ALONE, Ranks, least_of, ranks_on_this_machine
from infinity.zero.sizing import Sizing

AUTO_SHARE = 0.8  # the share of the available memory that a budget "auto" takes at most
# The memory that the process needs in addition to the ledger, at least: libraries that load late, activations, stacks,
# memory that the allocator keeps. Small models were measured at 60 to 85 MiB, without a device.
_BESIDE_BYTES = 256 << 20
_SUMS_SHARE = 4  # with "auto", sums take at most 1/4 of the device's free memory, because activations need some, too
_FINEST = 1024  # at most so many parts of the largest unit: enough for a block of many experts, and the search is short

_log = logging.getLogger(__name__)


# The host #


def host_capacity(config: Config, needs: MemoryNeeds, ranks: Ranks = ALONE) -> int:
    """Return the host budget: the configured one, or the useful part of this process's share of the free memory."""
    if config.tiering.host_memory_bytes is not None:
        return config.tiering.host_memory_bytes
    return min(needs.most_bytes, auto_bytes(available_memory_bytes(), ranks_on_this_machine(ranks)))


def auto_bytes(free_bytes: int, processes: int) -> int:
    """Return the host budget of each of `processes` that share the free memory.

    It leaves memory for what the process needs in addition to the budget. If little is free, as in a small container,
    it leaves at most half, because small models need less.
    """
    share = free_bytes / processes
    return int(min(AUTO_SHARE * share, share - min(_BESIDE_BYTES, share / 2)))


# The memory that is computed in #


@dataclass(frozen=True)
class DeviceBudgets:
    """The budgets of the memory in which the model computes.

    Attributes:
        ledger: the device's ledger; without parts if the host's ledger counts everything.
        params: units that are fetched and evicted.
        grads: gradients that stay until their update.
        sums: sums of gradients over several micro-batches, which are downloaded or sent to the replicas once.
        advice: returns which setting to raise to have this many more bytes in `params`.
    """

    ledger: Ledger
    params: Budget
    grads: Budget
    sums: Budget
    advice: Callable[[int], str]


def device_budgets(sizing: Sizing, config: Config, split: MemorySplit, host: Ledger, free_bytes: int) -> DeviceBudgets:
    """Divide the device's memory, of which `free_bytes` are free. Without a device, the host's budget is used.

    Raises:
        CapacityError: the memory is too small; the message has the number that is needed.
    """
    params, share = sizing.params.computed, sizing.device
    if sizing.rules.one_memory:
        device, payer, moving_bytes = Ledger("device memory", 0), host, split.params_bytes
        sums_bytes = split.sums_bytes
    else:
        device = payer = Ledger("device memory", _checked_capacity(sizing, config, free_bytes))
        others = _device_fixed_bytes(sizing) + share.grads_least
        moving_bytes = min(device.capacity_bytes - others, params.most)
        sums_bytes = share.sums
    payer.fix("parameters that stay", params.always)
    payer.fix("gradients on their way between ranks", sizing.collecting_bytes)
    payer.fix("optimizer states on the device", share.states)
    return DeviceBudgets(
        device,
        payer.open("parameters", moving_bytes),
        payer.open_within("gradients on the device", share.grads_most),
        payer.open_within("sums of gradients", sums_bytes),
        partial(room_advice, sizing.rules, sizing.params, sizing.largest.dtype.itemsize, moving_bytes),
    )


def device_least_bytes(sizing: Sizing) -> int:
    """Return the smallest device budget for this layout."""
    return _device_fixed_bytes(sizing) + sizing.params.computed.least + sizing.device.grads_least


def _device_fixed_bytes(sizing: Sizing) -> int:
    return sizing.params.computed.always + sizing.collecting_bytes + sizing.device.states


def _device_capacity(sizing: Sizing, config: Config, free_bytes: int) -> int:
    """Return the device budget: the configured one, or the useful part of the free memory."""
    if config.tiering.device_memory_bytes is not None:
        return config.tiering.device_memory_bytes
    share = sizing.device
    most = sizing.params.computed.most + share.grads_most + min(share.sums, free_bytes // _SUMS_SHARE)
    return min(int(AUTO_SHARE * free_bytes), _device_fixed_bytes(sizing) + most)


def _checked_capacity(sizing: Sizing, config: Config, free_bytes: int) -> int:
    """Return the device budget, if it is enough."""
    params, share = sizing.params.computed, sizing.device
    total, least = _device_capacity(sizing, config, free_bytes), device_least_bytes(sizing)
    if total >= least:
        return total
    if share.states:
        raise CapacityError(
            f"tiering.device_memory is {format_size(total)} but with their optimizer states on the device (offload_"
            f"optimizer.device is none, or ratio below 1) parameters need {format_size(params.always + params.least)}, "
            f"states {format_size(share.states)} and gradients {format_size(share.grads_least)} there: set "
            "zero_optimization.offload_optimizer.device to cpu or nvme, raise a ratio below 1, or raise device_memory "
            f"to {size_to_set(least)} or more"
        )
    raise CapacityError(
        f"tiering.device_memory is {format_size(total)} but the parameters need at least {format_size(least)} "
        f"on the device at once: raise it to {size_to_set(least)} or more, or offload parameters that stay there."
        + advice_on_unit(sizing.largest.name, sizing.largest.nbytes, total, sizing.largest.name in sizing.embeddings, 2)
    )


# Units that fit both #


def fits(sizing: Sizing, config: Config, host_bytes: int, free_bytes: int, *ranks: Ranks) -> bool:
    """Whether host and device have memory for the minimum of a layout, on every one of these ranks.

    Args:
        host_bytes: the host's budget.
        free_bytes: free bytes on the device.
    """
    enough = sizing.host_needs().least_bytes <= host_bytes
    if not sizing.rules.one_memory:
        enough = enough and device_least_bytes(sizing) <= _device_capacity(sizing, config, free_bytes)
    return least_of(enough, *ranks) > 0


def cut_to_fit(
    config: Config, size_up: Callable[[Config], Sizing], fits: Callable[[Sizing], bool]
) -> tuple[Config, Sizing, int | None]:
    """Resolve `tiering.max_unit_size`, and lay the model out with it.

    Each part of a block costs a gather and a reduction. So "auto" cuts only if whole blocks do not fit, and takes the
    first limit that fits: a half, a quarter, ... of the largest unit.

    Args:
        size_up: returns the layout for a configuration.
        fits: returns whether a layout fits on all ranks that compute together, because they must cut alike.

    Returns:
        (the configuration with the chosen size of units, its layout, None). If nothing fits, the last one is the least
        host budget with cut blocks, if it is less than whole blocks need.
    """
    whole = size_up(config)
    if config.tiering.max_unit_size_bytes is not None or fits(whole):
        return config, whole, None
    units, least_bytes = len(whole.specs), whole.host_needs().least_bytes
    cut_bytes = least_bytes
    limit = whole.largest.nbytes
    while limit > max(1, whole.largest.nbytes // _FINEST):
        limit //= 2
        cut = replace(config, tiering=replace(config.tiering, max_unit_size_bytes=limit))
        sizing = size_up(cut)
        if len(sizing.specs) == units:
            continue  # no further block was cut
        units = len(sizing.specs)
        if fits(sizing):
            _log.info("blocks are cut to units of at most %s: whole ones do not fit", format_size(limit))
            return cut, sizing, None
        cut_bytes = min(cut_bytes, sizing.host_needs().least_bytes)
    return config, whole, cut_bytes if cut_bytes < least_bytes else None  # the caller refuses it


# Drives #


@dataclass(frozen=True)
class Drive:
    """A drive of the machine, and its free space."""

    path: str
    free_bytes: int


def drives_here(config: Config) -> list[Drive]:
    """Return the drives of a configuration on this machine, each once, with the space that the configuration may use.

    For a directory that does not exist yet, its nearest existing parent counts, because `initialize` creates it.
    """
    found: dict[int, Drive] = {}
    for nvme in config.tiering.nvme:
        path = nvme.path.absolute()
        while not path.exists():
            path = path.parent
        number, free = os.stat(path).st_dev, shutil.disk_usage(path).free  # noqa: PTH116 (`path` may be a mount)
        before = found.get(number, Drive(str(nvme.path), 0))
        allowed = free if nvme.capacity_bytes is None else before.free_bytes + nvme.capacity_bytes
        found[number] = Drive(before.path, min(free, allowed))
    return list(found.values())


def free_on(drives: Iterable[Drive]) -> int:
    """Return the sum of the free bytes of these drives."""
    return sum(drive.free_bytes for drive in drives)


def free_for_swap(config: Config) -> int:
    """Remove the files of dead runs, and return the bytes that a new run may use on the drives.

    Raises:
        StorageError: a directory cannot be used.
    """
    for nvme in config.tiering.nvme:
        remove_stale(nvme.path)
    return free_on(drives_here(config))
