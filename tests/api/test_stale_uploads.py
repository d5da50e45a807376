"""What reaches the device is the newest, whatever was on its way there when it changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from infinity.config import NvmeConfig
from infinity.io import IoOptions, Priority
from infinity.memory import Arena, Budget
from infinity.telemetry import Counters, Times, now
from infinity.tiers import (
    Device,
    FlatSpec,
    Link,
    Memory,
    Move,
    Params,
    SameMemory,
    SwapSpace,
    open_swap,
)
from infinity.tiers.copies import State


class LateLink(SameMemory):
    """Copies happen in their order, and as late as they may: when somebody waits for them."""

    def __init__(self) -> None:
        self._left: list[_Late] = []
        self._lock = threading.RLock()

    def _copy_now(self, target: torch.Tensor, source: torch.Tensor) -> _Late:
        with self._lock:
            self._left.append(_Late(self, target, source))
            return self._left[-1]

    def run_until(self, last: _Late) -> None:
        with self._lock, torch.no_grad():
            while not last.over:
                copy = self._left.pop(0)
                copy.target.copy_(copy.source)
                copy.over = True


class _Late:
    def __init__(self, link: LateLink, target: torch.Tensor, source: torch.Tensor) -> None:
        self.link, self.target, self.source = link, target, source
        self.over = False

    def done(self) -> bool:
        return self.over

    def result(self) -> None:
        self.link.run_until(self)

    def times(self) -> Times | None:
        return now() if self.over else None


LINKS: dict[str, Callable[[], Link]] = {"prompt": SameMemory, "late": LateLink}


# One store #


@pytest.fixture(params=[(home, link) for home in ("host", "nvme") for link in LINKS], ids="-".join)
def params(request, tmp_path) -> Iterator[Params]:
    """Two units of 1024 elements, at home in host memory or on a drive, behind a link."""
    home, link = request.param
    specs = [FlatSpec(f"unit {index}", 1024, 1024, torch.float32, True) for index in range(2)]
    arena = Arena(1 << 20)
    swap = open_swap([NvmeConfig(tmp_path)], IoOptions(), "threads")
    homes = [Memory[home.upper()]] * 2
    device = Device(LINKS[link](), arena.part(1 << 14))
    store = Params(specs, homes, Budget("device", 1 << 16), Counters(None), arena=arena, swap=swap, device=device)
    swap.create()
    for unit in store.units:
        assert store.create(unit)
        unit.shard.fill_(unit.index)
        store.create_done(unit)
    yield store
    store.close()
    swap.close()
    arena.close()


def fetch(params: Params, unit: int) -> None:
    params.fetch_start(params.units[unit], Priority.PREFETCH)
    while upload_of(params, unit) is None:  # the read from the drive comes first
        params.advance(params.units[unit])


def upload_of(params: Params, unit: int) -> Move | None:
    """What is under way to the device."""
    return params.units[unit].field.arriving(Memory.DEVICE)


def update(params: Params, unit: int, value: float) -> None:
    """As the optimizer does: once the values are there, in place, and then to the device."""
    assert params.open_host(params.units[unit])
    change(params, unit, value)
    params.close_host(params.units[unit])


def change(params: Params, unit: int, value: float) -> None:
    """Once nothing reads or fills what is changed."""
    for move in params.begin_change(params.units[unit]):
        move.transfer.result()
    params.units[unit].shard.fill_(value)
    params.end_change(params.units[unit])


def test_an_update_overtakes_an_upload_that_has_begun(params) -> None:
    fetch(params, 0)
    update(params, 0, 7.0)
    params.fetch_wait(params.units[0])
    assert params.units[0].compute_copy.state is State.VALID
    assert params.units[0].tensor.eq(7).all()


def test_every_one_of_two_updates_arrives(params) -> None:
    """The second begins while the first still has the values in host memory."""
    fetch(params, 0)
    params.fetch_wait(params.units[0])
    assert params.open_host(params.units[0])
    change(params, 0, 7.0)
    update(params, 0, 8.0)
    params.close_host(params.units[0])
    params.await_update(params.units[0])
    assert params.units[0].tensor.eq(8).all()


def test_nothing_is_changed_under_an_upload(params) -> None:
    """It would arrive as a mixture of old and new values; so who changes them waits for it first."""
    fetch(params, 0)
    upload = upload_of(params, 0)
    assert params.open_host(params.units[0])
    finished = upload.transfer.done()
    moves = params.begin_change(params.units[0])
    assert finished or upload in moves
    upload.transfer.result()
    params.close_host(params.units[0])
    assert params.units[0].update_upload is not None or params.units[0].compute_copy.state is State.VALID


def test_memory_that_an_upload_reads_is_not_given_to_others(params) -> None:
    """The fetch leaves the image first, the update's upload is still reading it, then another unit needs memory."""
    fetch(params, 0)
    assert params.open_host(params.units[0])
    link = params._device.link
    upload_later = link.compute_waits
    link.compute_waits = lambda token: None  # a device that lags behind the host
    change(params, 0, 7.0)
    params.close_host(params.units[0])
    fetch(params, 1)
    params.host_wait(params.units[1])
    link.compute_waits = upload_later
    params.fetch_wait(params.units[1])
    assert params.units[0].tensor.eq(7).all()
    assert params.units[1].tensor.eq(1).all()


def test_compute_waits_for_the_first_values_of_what_stays(tmp_path) -> None:
    spec = FlatSpec("stays", 1024, 1024, torch.float32, False)
    arena = Arena(1 << 20)
    budget, swap = Budget("device", 0), SwapSpace((), ())
    with_link = Params(
        [spec], [Memory.DEVICE], budget, Counters(None), arena=arena, swap=swap, device=Device(LateLink(), arena)
    )
    (unit,) = with_link.units
    assert with_link.create(unit)
    unit.shard.fill_(5)
    with_link.create_done(unit)
    assert unit.tensor.eq(5).all()
    with_link.close()


def test_closing_waits_for_copies_under_way(params) -> None:
    fetch(params, 0)
    upload = upload_of(params, 0)
    params.close()
    assert upload.transfer.done()
