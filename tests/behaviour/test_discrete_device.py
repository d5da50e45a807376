"""The path of a device with memory of its own, run on this machine through a link that copies within host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity
from infinity.io.gds import DeviceReader, HostReader
from infinity.tiers import SameMemory
from tests.behaviour.reference import (
    ARCHITECTURES,
    Placement,
    Recipe,
    Result,
    assert_same_bits,
    batches,
    least_memory,
    tiny_gpt2,
    tiny_llama,
    train,
    train_on,
    trained_on,
)
from tests.behaviour.test_parity import STEPS, in_memory


def least_device_memory(placement: Placement, recipe: Recipe) -> int:
    return least_memory(tiny_llama(), recipe.config(placement), "device_memory", link=SameMemory())


def test_checkpoints_move_between_kinds_of_devices(tmp_path) -> None:
    recipe = Recipe("bf16", clipping=0.5)
    data = batches(8)
    swap = tmp_path / "swap"
    swap.mkdir()
    config = recipe.config(Placement("nvme", "nvme", swap, "64KiB"))
    with infinity.initialize(model=tiny_gpt2(), config=config, link=SameMemory())[0] as engine:
        train_on(engine, data[:4])
        engine.save_checkpoint(tmp_path / "saved")
        uninterrupted = train_on(engine, data[4:])
    for link in (None, SameMemory()):
        with infinity.initialize(model=tiny_gpt2(5), config=config, link=link)[0] as engine:
            engine.load_checkpoint(tmp_path / "saved")
            assert train_on(engine, data[4:]) == uninterrupted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_cuda_placements_agree(architecture, device, clipping, tmp_path: Path) -> None:
    """On a GPU every placement computes the same kernels on the same values."""
    recipe = Recipe("bf16", 1, clipping, STEPS)

    def train_on_gpu(placement: Placement) -> Result:
        config = recipe.config(placement)
        with infinity.initialize(model=ARCHITECTURES[architecture](), config=config, device="cuda")[0] as engine:
            return trained_on(engine, [ids.to(engine.device) for ids in batches(recipe.steps)])

    assert_same_bits(train_on_gpu(Placement(device, device, tmp_path)), train_on_gpu(Placement("none", "cpu")))


class CountingReader(HostReader):
    def __init__(self) -> None:
        self.reads = 0

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        self.reads += 1
        return super().read(path, offset, target)


class DirectMemory(SameMemory):
    """A device that drives can write into."""

    def __init__(self, reader: DeviceReader | str) -> None:
        self.reader = reader

    def device_reader(self) -> DeviceReader | str:
        return self.reader


def past_the_host(placement: Placement, clipping: float, reader: DeviceReader | str, *paths: Path) -> Result:
    """A model that hardly fits the device, read straight into it."""
    recipe = Recipe("bf16", 1, clipping, STEPS)
    memory = least_device_memory(placement, recipe)
    recipe.extra["aio"] = {"use_gds": True}
    nvme = [{"path": str(path)} for path in paths]
    return train(tiny_llama(), recipe, placement, DirectMemory(reader), device_memory=memory, nvme=nvme)


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_reading_past_the_host_gives_the_same_bits(clipping, names, tmp_path) -> None:
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.mkdir()
    reader = CountingReader()
    placed = past_the_host(Placement("nvme", "nvme", tmp_path, "64KiB", "640KB"), clipping, reader, *paths)
    assert reader.reads > 20
    assert_same_bits(placed, in_memory("llama", "bf16", 1, clipping))


def test_no_way_past_the_host_is_a_warning(tmp_path, caplog) -> None:
    placement = Placement("nvme", "nvme", tmp_path, "64KiB", "640KB")
    placed = past_the_host(placement, 0.5, "cuFile is absent", tmp_path)
    assert "parameters go through host memory: cuFile is absent" in caplog.text
    assert_same_bits(placed, in_memory("llama", "bf16", 1, 0.5))


def test_a_failing_read_past_the_host_names_the_file(tmp_path) -> None:
    class Failing(HostReader):
        def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
            raise RuntimeError("cuFile error 5011")

    with pytest.raises(infinity.StorageError, match="cuFile error 5011") as failed:
        past_the_host(Placement("nvme", "nvme", tmp_path, "64KiB", "640KB"), 0.0, Failing(), tmp_path)
    assert str(tmp_path) in failed.value.filename


def test_reading_past_the_host_excludes_checksums(tmp_path) -> None:
    recipe = Recipe("bf16", extra={"aio": {"use_gds": True}})
    with pytest.raises(infinity.ConfigError, match=r"tiering\.checksum"):
        train(tiny_llama(), recipe, Placement("nvme", "nvme", tmp_path), SameMemory(), checksum=True)
