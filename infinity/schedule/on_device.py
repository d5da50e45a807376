"""Choose the units that are updated on the compute device, with their optimizer states and gradients on it.

[Note: which units go to the device first]
Gradients of a unit that is updated on the device never cross the link, and its update takes no time of the host's
cores. So units whose update does not overlap with any computation go first. These are the first unit, whose gradients
come last in backward and which the next forward pass needs first, and the small parameters that never leave, whose
gradients are complete only after backward. The first two blocks follow, because little computation runs between their
gradients and their next use. The other units are taken evenly from the whole model, so that the link and the cores have
equal work in every part of backward. The order does not depend on the amount of memory; more memory takes more units.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from infinity.config import Config
from infinity.errors import ConfigError

_EARLY = 2  # blocks at the start of the model, which go before the units that are taken evenly
_WORTH_NUMEL = 1 << 24  # the host's cores update this many elements in 2 to 5 ms

_log = logging.getLogger(__name__)


def share_on_device(config: Config, *, discrete: bool, exact: bool) -> float:
    """Return the share of optimizer states that `offload_optimizer.ratio` leaves on the device.

    Args:
        discrete: whether the compute device has memory of its own.
        exact: whether the state format has exact moments, which a device can update, too.

    Raises:
        ConfigError: the states cannot be updated on the device.
    """
    ratio = config.zero.offload_optimizer.ratio
    if ratio is None or ratio == 1.0:
        return 0.0
    key = f"zero_optimization.offload_optimizer.ratio is {ratio:g}"
    return 1.0 - ratio if _can_be_on_device(key, "ratio", config, discrete=discrete, exact=exact) else 0.0


def may_fill(config: Config, ranks: int, *, discrete: bool, exact: bool) -> bool:
    """Whether optimizer states may move to the device after the first step, see `tiering.fill_device`.

    Args:
        ranks: number of ranks that train the model together; for the other arguments see `share_on_device`.

    Raises:
        ConfigError: `fill_device` is true, but states cannot move to the device.
    """
    if config.tiering.fill_device == "auto":
        return not why_not_filled(config, ranks, discrete=discrete, exact=exact)
    key = "tiering.fill_device is true"
    if not config.tiering.fill_device:
        return False
    if not _can_be_on_device(key, "fill_device", config, discrete=discrete, exact=exact):
        return False
    if config.zero.stage == 3 and ranks > 1:
        raise ConfigError(
            f"{key}, but at stage 3 with {ranks} ranks the parameters of these states would have to stay on the "
            "device, too: set offload_optimizer.ratio to keep a fixed share on the device, set zero_optimization.stage "
            "to 2, or leave fill_device out"
        )
    if config.tiering.update_schedule == "speculative":
        raise ConfigError(
            f'{key}, but tiering.update_schedule is "speculative": set it to "auto", which can choose "speculative" '
            "and fill the device, or leave fill_device out"
        )
    return True


def why_not_filled(config: Config, ranks: int, *, discrete: bool, exact: bool) -> str:
    """Return why `tiering.fill_device: auto` leaves optimizer states off the device; empty if it fills the device.

    For the arguments see `may_fill`.
    """
    offload, tiering = config.zero.offload_optimizer, config.tiering
    if not discrete:
        return "the model computes on the CPU, so there is no device memory to fill"
    if offload.device == "none":
        return "zero_optimization.offload_optimizer.device is none"
    if offload.ratio is not None:
        return f"zero_optimization.offload_optimizer.ratio {offload.ratio:g} says how much stays on the device"
    if not exact:
        return f"tiering.state_format {tiering.state_format} rounds moments, as only the kernels of the host do it"
    if tiering.crash_consistent:
        return "tiering.crash_consistent writes through what is updated in host memory"
    if tiering.update_schedule == "speculative":
        return 'tiering.update_schedule is speculative ("auto" may pick it, and fills the device)'
    if ranks > 1:
        # If a batch runs out of device memory after filling, one rank can repeat it, but several ranks end.
        return f"{ranks} ranks train together: set tiering.fill_device to true at stages 1 and 2"
    return ""


def first_to_stay(first: Sequence[int], numels: Sequence[int], bytes_per_param: int, free_bytes: int) -> frozenset[int]:
    """Return units whose parameters stay on the device, instead of being evicted, so that their states can move to it.

    The states move later, depending on measured activations. There are such units only if the device has memory for all
    parameters of the model in addition to the states and gradients of these units.

    Args:
        first: units whose update does not overlap with any computation.
        numels: trained elements of each unit.
        bytes_per_param: of states and gradients.
        free_bytes: device memory beyond all parameters; negative if they do not fit.
    """
    trained = sum(numels[unit] for unit in first)
    fit = trained >= _WORTH_NUMEL and trained * bytes_per_param <= free_bytes
    return frozenset(unit for unit in first if numels[unit]) if fit else frozenset()


def _can_be_on_device(key: str, name: str, config: Config, *, discrete: bool, exact: bool) -> bool:
    """Whether a device can update the states, as a key requests.

    Args:
        key: the key and its value, in words; `name`: the last part of the key.

    Raises:
        ConfigError: there is a device, but it cannot update this state format.
    """
    if not discrete:
        _log.info("%s, without effect: the model computes on the CPU, so there is no device memory", key)
        return False
    if not exact:
        raise ConfigError(
            f"{key}, but tiering.state_format {config.tiering.state_format} rounds moments, as only the kernels of the "
            f'host do it: set state_format to "auto", or leave {name} out'
        )
    return True


def addresses_stay(config: Config, *, discrete: bool) -> bool:
    """Whether tensors keep their device addresses for the whole run. True on the CPU, where addresses do not matter."""
    zero = config.zero
    offloads = zero.offload_param.device != "none" or zero.offload_optimizer.device != "none"
    return not discrete or (zero.stage < 3 and not offloads)


def promotion_order(numels: Sequence[int], first: Collection[int]) -> list[int]:
    """Return units in the order in which they move to the device, see [Note: which units go to the device first].

    Args:
        numels: trained elements of each unit; units without trained elements are left out.
        first: units that come before the others.
    """
    others = [unit for unit, numel in enumerate(numels) if numel and unit not in first]
    digits = len(others).bit_length()
    spread = sorted(range(len(others)), key=lambda index: (index >= _EARLY, f"{index:0{digits}b}"[::-1]))
    return [unit for unit in first if numels[unit]] + [others[index] for index in spread]


def as_far_as_fits(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[int]:
    """Return the units that fit into the capacity together, in order; skip any that is too large."""
    taken = []
    for unit in order:
        if sizes[unit] <= capacity:
            taken.append(unit)
            capacity -= sizes[unit]
    return taken
