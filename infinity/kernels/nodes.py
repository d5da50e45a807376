"""Which processors are near a device: on a machine of several NUMA nodes, those of the node that it is attached to.

Memory that they touch first lies there, too, so that neither an update nor a copy crosses from node to node.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_SYSTEM = Path("/sys")


def cpus_near(device: torch.device, system: Path = _SYSTEM) -> frozenset[int]:
    """CPUs of the device's node that this process may use; none where there is one node, or nobody says which it is.

    Args:
        system: where the kernel tells of the machine.
    """
    address = _pci_address(device)
    nodes = system / "devices/system/node"
    if address is None or len(list(nodes.glob("node[0-9]*"))) < 2:
        return frozenset()
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        near = _cpus((nodes / f"node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):  # -1, for a device that is attached to none
        return frozenset()
    return near & os.sched_getaffinity(0)


def _pci_address(device: torch.device) -> str | None:
    """As the kernel writes it: domain, bus, device and function."""
    if device.type == "cpu":
        return None
    try:
        facts: Any = torch.get_device_module(device).get_device_properties(device)
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError):  # not of every device, nor from every version of torch
        return None


def _cpus(ranges: str) -> frozenset[int]:
    """Of the kernel's notation: 0-3,8,10-11."""
    found: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
