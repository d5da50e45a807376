"""Known machines: numbers to plan with before there is a machine to measure.

Peak rates are the maker's (NVIDIA's data sheets of the H200, H100 and A100 SXM, L40S, RTX 4090 and 3090: dense bf16
products that sum in float32). Device memory is what torch sees of these cards: the "80 GB" of an H100 are 79.2 GiB, and
the "48 GB" of an L40S are 44.4. Three numbers were measured on an H100 with 16 cores on 2026-11-28: a Llama 8B
reached 58% of the peak, pinned copies 54 GB/s up and 55 down, and AdamW 6.3e9 parameters a second. All other numbers
are assumptions: a transformer reaches 55% of the peak on every GPU, copies over PCI Express 4 25 GB/s, a desktop
updates 3e9 parameters a second, and drives move 6 GB/s. `infinity profile` measures the machine on which it runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from infinity.config.read import read_text
from infinity.errors import ConfigError

_GIB = 1 << 30
_SHARE = 0.55  # share of the peak rate that a transformer reaches
_OF_A_PROFILE = ("optimizer_rate", "disk")  # a profile of another machine can replace these


@dataclass(frozen=True)
class KnownMachine:
    """One machine with one device.

    Attributes:
        device_memory, machine_memory: bytes.
        flops: a second, of a transformer's products.
        link: bytes a second each way.
        optimizer_rate: parameters a second; None if unknown.
        disk: bytes a second; None if unknown.
    """

    device_memory: int
    machine_memory: int
    flops: float
    link: float
    optimizer_rate: float | None
    disk: float | None


def _server(gibibytes: float, peak: float, link: float = 54e9) -> KnownMachine:
    return KnownMachine(int(gibibytes * _GIB), 512 << 30, _SHARE * peak, link, 6.3e9, 6e9)


def _desktop(gibibytes: float, peak: float) -> KnownMachine:
    return KnownMachine(int(gibibytes * _GIB), 64 << 30, _SHARE * peak, 25e9, 3e9, 6e9)


MACHINES = {
    "H200": _server(139, 989e12),
    "H100": _server(79.17, 989e12),
    "A100": _server(79.1, 312e12, link=25e9),
    "L40S": _server(44.4, 362e12, link=25e9),
    "4090": _desktop(23.5, 165e12),
    "3090": _desktop(23.5, 71e12),
}


def known_machine(name: str, *, profiled: bool = False) -> KnownMachine:
    """Return one of `MACHINES`, or the machine in a JSON file whose keys are the fields of `KnownMachine`.

    Args:
        profiled: a profile replaces the assumed rates of the drives and the optimizer, but not a file's.

    Raises:
        ConfigError: the name is unknown, or the file lacks a number.
    """
    if name in MACHINES:
        return replace(MACHINES[name], optimizer_rate=None, disk=None) if profiled else MACHINES[name]
    if not name.endswith(".json"):
        raise ConfigError(f"--emulate {name}: no such machine; there are {', '.join(MACHINES)}, or a JSON file")
    try:
        values: Any = json.loads(read_text(name))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--emulate {name} cannot be read: {error}") from error
    wanted = [field.name for field in fields(KnownMachine)]
    optional = _OF_A_PROFILE if profiled else ()
    if not isinstance(values, dict) or not set(wanted) - set(optional) <= set(values) <= set(wanted):
        raise ConfigError(
            f"--emulate {name} must be an object with these numbers and no others: {', '.join(wanted)}"
            + (f"; without {' and '.join(optional)}, those of --profile count" if optional else "")
        )
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigError(f"--emulate {name}: {key} is {value!r}; it must be a number above 0")
    whole = {key: int(values[key]) for key in ("device_memory", "machine_memory")}
    return KnownMachine(**{**dict.fromkeys(_OF_A_PROFILE), **values, **whole})
