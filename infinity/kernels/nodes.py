"""The processors near a device: on a machine with several NUMA nodes, the CPUs of the device's node.

The node of the CPU that touches a page first provides it, so that neither updates nor copies cross between nodes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_SYSTEM = Path("/sys")


def cpus_near(device: torch.device, system: Path = _SYSTEM) -> frozenset[int]:
    """Return the CPUs of the device's node that this process may use; empty with one node, or if the node is unknown.

    Args:
        system: mount point of sysfs.
    """
    address = _pci_address(device)
    nodes = system / "devices/system/node"
    if address is None or len(list(nodes.glob("node[0-9]*"))) < 2:
        return frozenset()
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        near = _cpus((nodes / f"node{node}/cpulist").read_text(encoding="ascii"))
    except (OSError, ValueError):  # -1 for a device without a node
        return frozenset()
    return near & os.sched_getaffinity(0)


def _pci_address(device: torch.device) -> str | None:
    """Return the address in the kernel's form: domain, bus, device and function."""
    if device.type == "cpu":
        return None
    try:
        facts: Any = torch.get_device_module(device).get_device_properties(device)
        return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError):  # missing for some devices and in some versions of torch
        return None


def _cpus(ranges: str) -> frozenset[int]:
    """Parse the kernel's notation: 0-3,8,10-11."""
    found: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
