"""The speeds of a machine's parts: from its profile, or as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infinity.errors import ConfigError
from infinity.planner.work import Pass, Product

Points = tuple[tuple[int, float], ...]  # a rate or share by number of rows
_SHARE_MIXED = 2.0  # a byte read and a byte written, at a rate that counts both


@dataclass(frozen=True)
class Duplex:
    """Bytes a second each way alone, and both ways at once together."""

    inward: float
    outward: float
    both: float

    def seconds(self, inward_bytes: float, outward_bytes: float) -> float:
        """Return the time to move these bytes: both ways at once as long as both have bytes, then one way alone."""
        paired = min(inward_bytes, outward_bytes)
        rest = (inward_bytes - paired) / self.inward + (outward_bytes - paired) / self.outward
        return _SHARE_MIXED * paired / self.both + rest


@dataclass(frozen=True)
class Rates:
    """The rates of one machine; None if unknown.

    Attributes:
        products: (rows, flop a second) by layout of the operands, of one device.
        memory_bytes_per_s: reads and writes of operations other than products, of one device.
        fresh_bytes_per_s: at which the system provides new memory, in addition to filling it.
        optimizer_params_per_s: updates of all processes of the machine together.
        disk: all drives of the machine together; inward is read.
        link: of one device; inward is to the device.
        gather_bytes_per_s, reduce_bytes_per_s: received or sent by one rank.
        operation_s: overhead of an operation in Python and in torch.
        launches_ahead: this overhead overlaps with computation on the device.
        beside: the share of its speed that a part of the machine ("compute", "optimizer" or "disk") keeps while others
            work: (rows of the products, share) by this part and the set of the others.
    """

    products: dict[str, Points] = field(default_factory=dict)
    memory_bytes_per_s: float | None = None
    fresh_bytes_per_s: float | None = None
    optimizer_params_per_s: float | None = None
    disk: Duplex | None = None
    link: Duplex | None = None
    gather_bytes_per_s: float | None = None
    reduce_bytes_per_s: float | None = None
    operation_s: float = 0.0
    launches_ahead: bool = False
    beside: Mapping[tuple[str, frozenset[str]], Points] = field(default_factory=dict)

    def compute_s(self, work: Pass) -> float | None:
        """Return the time of one pass on an otherwise idle device; None if the rates are unknown."""
        if not self.products:
            return None
        computed = sum(flops / self._product_rate(kind) for kind, flops in work.flops.items())
        computed += work.other_bytes / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        computed += work.fresh_bytes / self.fresh_bytes_per_s if self.fresh_bytes_per_s else 0.0
        launched = work.operations * self.operation_s
        return max(computed, launched) if self.launches_ahead else computed + launched

    def _product_rate(self, kind: Product) -> float:
        return _at(self.products.get(kind.layout) or next(iter(self.products.values())), kind.rows)

    def left(self, part: str, others: frozenset[str], rows: int) -> float | None:
        """Return the share of its speed that a part keeps while all these others work; None if unknown for one of them.

        If it was measured only in pairs, the shares are multiplied.

        Args:
            rows: of most products.
        """
        if (part, others) in self.beside:
            return _at(self.beside[part, others], rows)
        pairs = [(part, frozenset({other})) for other in sorted(others)]
        if any(pair not in self.beside for pair in pairs):
            return None
        return math.prod(_at(self.beside[pair], rows) for pair in pairs)


def rates_of(profile: dict[str, Any], *, dtype: str, state_format: str, device: str = "cpu") -> Rates:
    """Take the rates from a profile made by `infinity profile`.

    Args:
        dtype: in which the model computes, by torch's name.
        device: type of the compute device.

    Raises:
        ConfigError: the profile has no such device or dtype.
    """
    products: dict[str, list[tuple[int, float]]] = {}
    for entry in profile["products"] or ():
        if entry["device"] == device and entry["dtype"] == dtype:
            products.setdefault(entry["layout"], []).append((entry["rows"], entry["flop_per_s"]))
    if not products:
        raise ConfigError(f"the profile has no matrix products in {dtype} on {device}: profile a machine that has it")
    optimizer = [entry for entry in profile["optimizer"] if entry["format"] == state_format]
    memory = max(profile["memory"], key=lambda entry: entry["threads"])
    ranks, link = profile["ranks"], profile["link"]
    return Rates(
        {layout: tuple(sorted(points)) for layout, points in products.items()},
        memory_bytes_per_s=memory["triad_bytes_per_s"] if device == "cpu" else None,
        fresh_bytes_per_s=memory["fresh_bytes_per_s"] if device == "cpu" else None,
        optimizer_params_per_s=max((entry["params_per_s"] for entry in optimizer), default=None),
        disk=_drives(profile),
        link=None if link is None else _link(link),
        gather_bytes_per_s=ranks and ranks["all_gather_bytes_per_s"],
        reduce_bytes_per_s=ranks and ranks["reduce_scatter_bytes_per_s"],
        operation_s=max(
            (cost["operation_s"] for cost in profile["operations"] or () if cost["device"] == device), default=0.0
        ),
        launches_ahead=device != "cpu",
        beside=_contention(profile["contention"] or ()),
    )


def _at(points: Points, rows: int) -> float:
    """Interpolate between the two nearest numbers of rows on logarithmic scales; beyond them, return the nearest."""
    below = [point for point in points if point[0] <= rows]
    above = [point for point in points if point[0] > rows]
    if not below or not above:
        return (below[-1] if below else above[0])[1]
    (low, slow), (high, fast) = below[-1], above[0]
    low = max(low, 1)  # a product without rows has one rate for all
    share = math.log(rows / low) / math.log(high / low)
    return float(slow ** (1 - share) * fast**share)


def _contention(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[str, frozenset[str]], Points]:
    found: dict[tuple[str, frozenset[str]], list[tuple[int, float]]] = {}
    for entry in entries:
        pair = entry["part"], frozenset(entry["beside"])
        found.setdefault(pair, []).append((entry["rows"] or 1, entry["share"]))
    return {pair: tuple(sorted(points)) for pair, points in found.items()}


def _drives(profile: dict[str, Any]) -> Duplex | None:
    if not profile["drives"]:
        return None
    rates = profile["drives_together"] or profile["drives"][0]
    return Duplex(*(rates[f"{name}_bytes_per_s"] for name in ("read", "write", "mixed")))


def _link(link: dict[str, Any]) -> Duplex:
    both = link["both_to_device_bytes_per_s"] + link["both_to_host_bytes_per_s"]
    return Duplex(link["to_device_bytes_per_s"], link["to_host_bytes_per_s"], both)


def with_numbers(
    rates: Rates,
    *,
    flop_per_s: float | None = None,
    optimizer_params_per_s: float | None = None,
    disk_bytes_per_s: float | None = None,
    link_bytes_per_s: float | None = None,
    collective_bytes_per_s: float | None = None,
    drives: int = 1,
) -> Rates:
    """Replace measured rates by numbers: a drive's rate is the sum of both directions, a link's is for each way.

    Args:
        drives: factor on the number of drives.
    """
    if flop_per_s is not None:
        rates = replace(rates, products={"nt": ((1, flop_per_s),)}, memory_bytes_per_s=None, fresh_bytes_per_s=None)
    if optimizer_params_per_s is not None:
        rates = replace(rates, optimizer_params_per_s=optimizer_params_per_s)
    if disk_bytes_per_s is not None:
        rates = replace(rates, disk=Duplex(*(disk_bytes_per_s,) * 3))
    if link_bytes_per_s is not None:
        rates = replace(rates, link=Duplex(link_bytes_per_s, link_bytes_per_s, 2 * link_bytes_per_s))
    if collective_bytes_per_s is not None:
        rates = replace(rates, gather_bytes_per_s=collective_bytes_per_s, reduce_bytes_per_s=collective_bytes_per_s)
    if drives != 1 and rates.disk is not None:
        disk = rates.disk
        rates = replace(rates, disk=Duplex(drives * disk.inward, drives * disk.outward, drives * disk.both))
    return rates
