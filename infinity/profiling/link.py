"""Rates of the link between host memory and a compute device, each way and both at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch

from infinity.memory import Arena
from infinity.tiers import AcceleratorLink, Transfer

_COPY_BYTES = 64 << 20
_ROUNDS = 8
_LOOK_EVERY_S = 1e-4


def link_rates(device: torch.device, copy_bytes: int = _COPY_BYTES) -> dict[str, Any]:
    """Return the profile's `link`: rates of copies between the device and page-locked memory."""
    with (
        closing(Arena(2 * copy_bytes, pin=device)) as arena,
        arena.lease(copy_bytes) as source,
        arena.lease(copy_bytes) as target,
    ):
        return {"device": device.type, **_rates(device, source.tensor(torch.uint8), target.tensor(torch.uint8))}


def _rates(device: torch.device, source: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    link = AcceleratorLink(device)
    source.fill_(1)
    target.fill_(2)
    here, there = (torch.zeros(source.numel(), dtype=torch.uint8, device=device) for _ in range(2))

    def upload() -> Transfer:
        return link.upload(here, source)

    def download() -> Transfer:
        return link.download(target, there)

    for start in (upload, download):
        start().result()  # the first copy includes one-time setup
    to_device, to_host = _seconds([upload])[0], _seconds([download])[0]
    both = _seconds([upload, download])
    moved = _ROUNDS * source.numel()
    return {
        "to_device_bytes_per_s": moved / to_device,
        "to_host_bytes_per_s": moved / to_host,
        "both_to_device_bytes_per_s": moved / both[0],
        "both_to_host_bytes_per_s": moved / both[1],
    }


def _seconds(starts: Sequence[Callable[[], Transfer]]) -> list[float]:
    """Start copies of all kinds in turn, and return the seconds until those of each kind have ended."""
    begin_s = time.perf_counter()
    tokens = [[start() for start in starts] for _ in range(_ROUNDS)]
    ends_s: dict[int, float] = {}
    while len(ends_s) < len(starts):  # poll instead of blocking: the second kind may end before the first
        for kind, last in enumerate(tokens[-1]):
            if kind not in ends_s and last.done():
                last.result()
                ends_s[kind] = time.perf_counter() - begin_s
        time.sleep(_LOOK_EVERY_S)
    return [ends_s[kind] for kind in range(len(starts))]
