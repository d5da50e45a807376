"""The late link tells on whoever does not wait."""

from __future__ import annotations

import pytest
import torch

from infinity.memory import Arena, StableBuffer
from tests.tiers.late_link import LateLink, watch_memory

N = 1024


@pytest.fixture
def link(monkeypatch) -> LateLink:
    link = LateLink(patience=None)
    watch_memory(monkeypatch, link.watch)
    return link


def device_memory() -> StableBuffer:
    buffer = StableBuffer(4 * N)
    buffer.allocate()
    return buffer


def test_compute_sees_an_upload_that_the_host_does_not_know_to_be_over(link) -> None:
    device, host = torch.zeros(N), torch.arange(N, dtype=torch.float32)
    token = link.upload(device, host)
    assert device.isnan().all()
    link.compute_waits(token)
    assert torch.equal(device, host)
    assert not token.done()
    assert token.result() == 4 * N
    assert token.done()


def test_a_download_arrives_when_somebody_waits(link) -> None:
    device, host = torch.ones(N), torch.zeros(N)
    token = link.download(host, device)
    link.compute_waits(token)
    device.zero_()  # behind the copy
    assert host.isnan().all()
    token.result()
    assert host.eq(1).all()


def test_copies_of_one_direction_keep_their_order(link) -> None:
    device = torch.zeros(2, N)
    first, second = (link.upload(device[index], torch.full((N,), float(index))) for index in range(2))
    second.result()
    assert first.done()


def test_what_compute_has_waited_for_is_over_before_what_begins_then(link) -> None:
    device, host = torch.ones(N), torch.zeros(N)
    down = link.download(host, device)
    link.compute_waits(down)
    mark = link.mark()
    up = link.upload(device, torch.ones(N))
    assert not mark.done()
    up.result()
    assert mark.done()
    assert down.done()
    assert host.eq(1).all()


def test_a_download_of_what_is_there_waits_for_that_alone(link) -> None:
    device, host = torch.ones(3, N), torch.zeros(3, N)
    gradients = link.download(host[0], device[0])
    link.compute_waits(link.upload(device[1], torch.ones(N)))
    others = link.download(host[1], device[1])
    early = link.download(host[2], device[2], gradients)
    early.result()
    assert host[2].eq(1).all()
    assert gradients.done()
    assert not others.done()


def test_nobody_waits_and_time_passes() -> None:
    link = LateLink(seed=1, patience=8)
    device = torch.zeros(20, N)
    tokens = [link.upload(row, torch.ones(N)) for row in device]
    assert [token.over for token in tokens] == sorted((token.over for token in tokens), reverse=True)
    assert tokens[0].over
    assert not tokens[-1].over


def test_a_source_that_changes_is_told(link) -> None:
    device, host = torch.zeros(N), torch.ones(N)
    token = link.upload(device, host)
    link.compute_waits(token)
    host.zero_()
    with pytest.raises(AssertionError, match="the source of upload 1"):
        token.result()
    assert link.watch.faults


def test_a_target_that_others_write_is_told(link) -> None:
    device, host = torch.ones(N), torch.zeros(N)
    token = link.download(host, device)
    host[0] = 0
    with pytest.raises(AssertionError, match="the target of download 1"):
        token.result()


def test_copies_that_cross_are_told(link) -> None:
    device, host = torch.zeros(2, N), torch.zeros(N)
    link.download(host, device[0])
    with pytest.raises(AssertionError, match=r"upload 2 .* while download 1 .* is under way"):
        link.upload(device[1], host)


def test_host_memory_is_kept_until_the_host_knows(link) -> None:
    arena, device = Arena(1 << 16), torch.zeros(N)
    lease = arena.lease(4 * N)
    token = link.upload(device, lease.tensor(torch.float32).fill_(1))
    link.compute_waits(token)
    lease.release()
    with pytest.raises(AssertionError, match="4096 bytes are leased while upload 1"):
        arena.lease(4 * N)
    with pytest.raises(AssertionError, match="an arena is closed while upload 1"):
        arena.close()
    token.result()
    arena.close()


def test_device_memory_is_kept_until_compute_is_behind_the_copy(link) -> None:
    buffer = device_memory()
    token = link.download(torch.zeros(N), buffer.tensor(torch.float32, N))
    with pytest.raises(AssertionError, match="device memory is freed while download 1"):
        buffer.free()
    link.compute_waits(token)
    buffer.free()
    token.result()


def test_device_memory_that_only_the_copy_knows_is_told(link) -> None:
    token = link.download(torch.zeros(N), torch.ones(N))
    with pytest.raises(AssertionError, match=r"the device memory of download 1 .* was freed"):
        token.result()
