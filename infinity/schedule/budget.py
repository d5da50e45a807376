"""Divide a memory budget: first the minimum of each part, then the parts that save the most traffic per byte.

If the compute device is the CPU, one budget pays for everything. If the device has its own memory, the device's budget
pays for the tensors that the model computes on and for the gradients that are collected next to them. The host's budget
pays for everything else.

The traffic that memory saves in a step decides the order. In the `split` format, a parameter that stays in memory has
2 bytes, and saves two reads (forward and backward) and one write: 3 bytes of traffic for each byte of memory. Its
states have 10 bytes, and save one read and one write: 2 for each byte. So parameters come before states. Before both
come the gradients of a second unit, so that computation and update overlap. Without them, the drive would be idle while
the next unit is computed, and the computation would wait while that unit is updated.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from infinity.config import format_size, size_to_set
from infinity.errors import CapacityError

_RING_SHARE = 16  # tiles in flight take at most 1/16 of the capacity, unless the minimum is more


@dataclass(frozen=True)
class MemoryNeeds:
    """For each part of a memory: the fewest bytes with which training works, and the most that it can use.

    Attributes:
        tile_bytes: a full tile of optimizer states.
        ring_min_bytes: tiles in flight: the fewest with which the optimizer reads, updates and writes at the same time.
        ring_bytes: tiles in flight: the most that it can use.
        params_min_bytes: largest set of units that must be resident together, if the model computes in this memory.
        params_bytes: all units that are fetched and evicted, if the model computes in this memory.
        grads_min_bytes: gradients that exist at once before the first update frees some.
        grads_overlap_bytes: gradients of two units, if updates run during backward: one is computed, one is updated.
        grads_bytes: the most gradients that exist at once.
        states_min_bytes: optimizer states whose home is this tier.
        states_bytes: all optimizer states. If they stay by whole units, also the gradients of these units.
        always_bytes: parameters that are never evicted, if the model computes in this memory.
        homes_min_bytes, homes_bytes: shards of parameters, if the model computes on other tensors, see
            [Note: placement] in rules.py: shards whose home is this memory, and shards in transit to the device.
        collecting_bytes: full gradients before their reduction to shards, if they are in this memory.
        activations_bytes: activations that are offloaded to this memory.
        initial_bytes: first values in transit to their tiers at `initialize`, before gradients and activations exist.
        images_bytes: the undo log: images (old values) of all tiles whose updates may be speculative.
        sums_bytes: sums of gradients over a step's micro-batches, before their reduction over the ranks.
        largest_unit: name of the largest unit, for the error message, its bytes, and whether it is an embedding.
    """

    tile_bytes: int
    ring_min_bytes: int
    ring_bytes: int
    params_min_bytes: int
    params_bytes: int
    grads_min_bytes: int
    grads_overlap_bytes: int
    grads_bytes: int
    states_min_bytes: int
    states_bytes: int
    always_bytes: int
    largest_unit: str
    largest_unit_bytes: int = 0
    largest_is_embedding: bool = False
    homes_min_bytes: int = 0
    homes_bytes: int = 0
    collecting_bytes: int = 0
    activations_bytes: int = 0
    initial_bytes: int = 0
    images_bytes: int = 0
    sums_bytes: int = 0

    @property
    def least_bytes(self) -> int:
        params_bytes = self.always_bytes + self.params_min_bytes + self.homes_min_bytes
        return params_bytes + self.ring_min_bytes + self.states_min_bytes + self._shared_peak(self.grads_min_bytes)

    @property
    def most_bytes(self) -> int:
        params_bytes = self.always_bytes + self.params_bytes + self.homes_bytes
        states_bytes = self.ring_bytes + self.states_bytes + self.images_bytes + self.sums_bytes
        return params_bytes + states_bytes + self._shared_peak(self.grads_bytes)

    def _shared_peak(self, grads_bytes: int) -> int:
        """Return the bytes of memory that first values use during `initialize`, and gradients and activations later."""
        return max(grads_bytes + self.collecting_bytes + self.activations_bytes, self.initial_bytes)

    @property
    def grads_least_bytes(self) -> int:
        """Minimum for gradients, or more if first values need more of the same memory during `initialize`."""
        initial = self.initial_bytes - self.collecting_bytes - self.activations_bytes
        return min(self.grads_bytes, max(self.grads_min_bytes, initial))

    def initial_extra_bytes(self, split: MemorySplit) -> int:
        """Return the bytes that `initialize` needs beyond the memory that training uses later."""
        return max(0, self.initial_bytes - self.collecting_bytes - self.activations_bytes - split.grads_bytes)


@dataclass(frozen=True)
class MemorySplit:
    """Bytes granted to each part, see `MemoryNeeds`; `states_bytes` are for states that stay in this memory."""

    params_bytes: int
    grads_bytes: int
    states_bytes: int
    ring_bytes: int
    homes_bytes: int = 0
    images_bytes: int = 0
    sums_bytes: int = 0

    @property
    def granted_bytes(self) -> int:
        return sum(astuple(self))


def split_memory(needs: MemoryNeeds, capacity_bytes: int, cut_bytes: int | None = None) -> MemorySplit:
    """Divide `capacity_bytes` of host memory among the needs.

    Args:
        cut_bytes: the smallest budget that works with blocks cut into several units, for the error message.

    Raises:
        CapacityError: the capacity is below `needs.least_bytes`; the message says by how much and why.
    """
    spare = capacity_bytes - needs.least_bytes
    if spare < 0:
        cut = "" if cut_bytes is None else f" (from {cut_bytes} on, blocks are cut into units of their modules)"
        raise CapacityError(
            f"tiering.host_memory is {format_size(capacity_bytes)} but this model needs at least "
            f"{format_size(needs.least_bytes)}: "
            f"parameters {format_size(needs.params_min_bytes + needs.homes_min_bytes)} "
            f"(largest unit `{needs.largest_unit}`), gradients {format_size(needs.grads_min_bytes)}, "
            f"optimizer tiles {format_size(needs.ring_min_bytes)}, "
            f"always held {format_size(needs.always_bytes + needs.states_min_bytes)}"
            f"{_further(needs)}. "
            f"Raise tiering.host_memory to {needs.least_bytes} bytes ({size_to_set(needs.least_bytes)}) or more"
            f"{cut}, lower tiering.tile_size, "
            "or move a section to nvme."
            + advice_on_unit(
                needs.largest_unit,
                needs.largest_unit_bytes,
                capacity_bytes,
                needs.largest_is_embedding,
                at_once=2 if needs.params_min_bytes else 1,
            )
        )
    ring = min(needs.ring_bytes, capacity_bytes // _RING_SHARE, needs.ring_min_bytes + spare)
    ring = max(needs.ring_min_bytes, ring // needs.tile_bytes * needs.tile_bytes)
    spare -= ring - needs.ring_min_bytes

    def grant(least: int, most: int) -> int:
        nonlocal spare
        granted = min(most, least + spare)
        spare -= granted - least
        return granted

    least = needs.grads_least_bytes
    grads = grant(least, max(least, needs.grads_overlap_bytes))
    params = grant(needs.params_min_bytes, needs.params_bytes)
    homes = grant(needs.homes_min_bytes, needs.homes_bytes)
    grads = grant(grads, needs.grads_bytes)
    states = grant(needs.states_min_bytes, needs.states_bytes)
    undo_log = grant(0, needs.images_bytes)
    sums = grant(0, needs.sums_bytes)
    return MemorySplit(params, grads, states, ring, homes, undo_log, sums)


def _further(needs: MemoryNeeds) -> str:
    """Return the needs that only some placements have, in words."""
    parts = {
        "gradients on their way between ranks": needs.collecting_bytes,
        "activations": needs.activations_bytes,
        "values on their way at initialize": needs.initial_bytes,
    }
    return "".join(f", {name} {format_size(nbytes)}" for name, nbytes in parts.items() if nbytes)


def raise_memory(key: str, more_bytes: int) -> str:
    """Return advice to raise the budget of a memory."""
    return f"raise {key} by {more_bytes} bytes ({size_to_set(more_bytes)}), of which parameters get a part"


def advice_on_unit(unit: str, unit_bytes: int, capacity_bytes: int, is_embedding: bool, at_once: int = 1) -> str:
    """Return advice about a unit that no schedule can fit; empty if it would fit.

    Args:
        at_once: how many unsharded units are in memory at once: the one in use, and the one being fetched.
    """
    if at_once * unit_bytes <= capacity_bytes:
        return ""
    size = format_size(unit_bytes)
    how = f"alone is larger than that ({size})"
    if unit_bytes <= capacity_bytes:
        how = f"alone takes {size} of that, in addition to the next unit, which is fetched at the same time,"
    if is_embedding:
        return (
            f" Unit `{unit}` {how} and is an embedding, which is held as a whole while it is used: only a larger "
            "budget helps, a smaller vocabulary, or bf16 for fp32."
        )
    return (
        f" Unit `{unit}` {how.rstrip(',')}: if it is a block, tiering.max_unit_size cuts it into units of its modules "
        f"(auto does so if that is enough; {format_size(unit_bytes // 4)}, for example, always does); a single "
        "nn.Linear can be replaced by infinity.zero.TiledLinear, whose parts are units of their own."
    )
