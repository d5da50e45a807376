"""The optimizer's threads run near the device, and give the same bits there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import infinity
from infinity import kernels
from infinity.kernels import nodes
from infinity.kernels._native import _adam
from infinity.zero import build
from tests.behaviour.reference import Placement, Recipe, batches, tiny_gpt2, train_on

CUDA = torch.device("cuda:1")
OWN = sorted(os.sched_getaffinity(0))


def machine(path: Path, node: str | None, *lists: str) -> Path:
    """What a kernel tells of a machine with these CPUs by node, and a device on one of them."""
    for index, cpus in enumerate(lists):
        (path / f"devices/system/node/node{index}").mkdir(parents=True)
        (path / f"devices/system/node/node{index}/cpulist").write_text(f"{cpus}\n")
    if node is not None:
        (path / "bus/pci/devices/0000:4b:00.0").mkdir(parents=True)
        (path / "bus/pci/devices/0000:4b:00.0/numa_node").write_text(f"{node}\n")
    return path


@pytest.fixture
def _a_card(monkeypatch):
    facts = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x4B, pci_device_id=0)
    module = SimpleNamespace(get_device_properties=lambda device: facts)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


@pytest.mark.usefixtures("_a_card")
def test_the_node_that_a_device_is_attached_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4, 12)))
    assert nodes.cpus_near(CUDA, machine(tmp_path, "1", "0-3,8-9", "4-7,10-11,20")) == {4, 5, 6, 7, 10, 11}


@pytest.mark.usefixtures("_a_card")
@pytest.mark.parametrize(
    ("node", "lists"), [("0", ("0-3",)), ("-1", ("0-1", "2-3")), (None, ("0-1", "2-3")), ("1", ("0-1", ""))]
)
def test_a_machine_of_one_node_or_that_does_not_say_binds_nothing(node, lists, tmp_path) -> None:
    assert nodes.cpus_near(CUDA, machine(tmp_path, node, *lists)) == frozenset()


def test_a_device_without_an_address_binds_nothing(tmp_path, monkeypatch) -> None:
    assert nodes.cpus_near(torch.device("cpu"), machine(tmp_path, "0", "0", "1")) == frozenset()
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(name="older"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert nodes.cpus_near(CUDA, tmp_path) == frozenset()


def bound(cpus: list[int]) -> list[str]:
    """Names of this process's threads that run on these CPUs alone."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        if sorted(os.sched_getaffinity(int(task.name))) == cpus:
            names.append((task / "comm").read_text().strip())
    return names


@pytest.mark.skipif(len(OWN) < 2, reason="one CPU")
def test_the_threads_of_kernels_and_of_updates_are_bound_and_no_others(tmp_path, monkeypatch) -> None:
    losses = []
    for near in ([], OWN[:1]):
        monkeypatch.setattr(build, "cpus_near", lambda device, near=near: frozenset(near))
        config = Recipe("bf16").config(Placement("nvme", "nvme", tmp_path, "64KiB"))
        with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
            kernels.set_threads(3)
            losses.append(train_on(engine, batches(3)))
            engine.synchronize()  # the pool is free
            wanted, until_s = 3 if near else 0, time.monotonic() + 20  # the update thread, and the pool's two
            while True:
                kernels.grad_store(torch.empty(1 << 20), torch.ones(1 << 20), accumulate=False)  # enough for the pool
                if len(bound(OWN[:1])) == wanted or time.monotonic() > until_s:
                    break
            assert len(bound(OWN[:1])) == wanted
            assert sorted(os.sched_getaffinity(0)) == OWN
    assert losses[0] == losses[1]


@pytest.fixture(autouse=True)
def _free_again():
    yield
    _adam.set_cpus([])
