"""Register host memory with a device's driver (pinning), so that the device copies from and to it directly.

torch has no common API for this. Device modules other than CUDA's may have `register_host` and `unregister_host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

import torch

from infinity.config import format_size
from infinity.errors import CapacityError

PIECE_BYTES = 64 << 30  # most bytes that one call registers; no copy crosses an address that is a multiple of it


def pin(device: torch.device, address: int, nbytes: int) -> tuple[int, ...]:
    """Register a range in pieces, see `copies`.

    Returns:
        The address of each piece; empty for a device that needs no registration.

    Raises:
        CapacityError: the driver refuses; no piece stays registered.
    """
    pinned: list[int] = []
    try:
        for start, size in _pieces(address, nbytes):
            if register(device, start, size):
                pinned.append(start)
    except CapacityError as error:
        unpin(device, pinned)
        raise CapacityError(
            f"{device.type} cannot pin {format_size(nbytes)} of host memory ({error}): lower tiering.host_memory"
        ) from error
    return tuple(pinned)


def unpin(device: torch.device, pinned: Iterable[int]) -> None:
    """Undo `pin`, given its result."""
    for address in pinned:
        unregister(device, address)


def copies(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Split a copy over the link so that no part touches two pieces, which a driver would refuse.

    Args:
        target, source: of the same shape; at most one of them is on the device.
    """
    host = target if target.device.type == "cpu" else source
    first = host.data_ptr()
    last = first + (sum((n - 1) * step for n, step in zip(host.shape, host.stride(), strict=True)) * host.itemsize)
    if not host.numel() or first // PIECE_BYTES == last // PIECE_BYTES:
        yield target, source
        return
    dim = next(dim for dim, size in enumerate(host.shape) if size > 1)
    half = host.shape[dim] // 2
    for start, size in ((0, half), (half, host.shape[dim] - half)):
        yield from copies(target.narrow(dim, start, size), source.narrow(dim, start, size))


def _pieces(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    stop = address + nbytes
    while address < stop:
        end = min(stop, (address // PIECE_BYTES + 1) * PIECE_BYTES)
        yield address, end - address
        address = end


def register(device: torch.device, address: int, nbytes: int) -> bool:
    """Page-lock a range for a device. Return False for a device that needs no registration.

    Raises:
        CapacityError: the driver refuses.
    """
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    else:
        register_host = getattr(torch.get_device_module(device), "register_host", None)
        if register_host is None:
            return False
        status = int(register_host(address, nbytes))
    if status != 0:
        _clear_error(device)
        raise CapacityError(f"error {status}")
    return True


def unregister(device: torch.device, address: int) -> None:
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)
    else:
        torch.get_device_module(device).unregister_host(address)


def _clear_error(device: torch.device) -> None:
    """Clear the driver's last error of this thread, which the next kernel would otherwise report.

    torch has no call for it. It reads and clears the last error after each launch, so this launches one kernel.
    """
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)
