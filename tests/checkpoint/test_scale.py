"""How a checkpoint of a trillion parameters is divided among 512 ranks: counted, without a byte of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from infinity.checkpoint.stored import StoredTensor
from infinity.checkpoint.sums import BLOCK_BYTES
from infinity.checkpoint.tensors import TensorPart
from infinity.tiers import Sharding
from infinity.zero.partition import Alignment, Partition, make_partition

WIDTH, LAYERS = 25600, 128  # 12 x WIDTH^2 x LAYERS: a trillion
BYTES = 12  # of master and two moments
SAMPLED = (0, 1, 200, 383)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, 4 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(LAYERS)))


def partition_of(model: nn.Module, rank: int, ranks: int) -> Partition:
    groups = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    align = Alignment(2048)
    sharding = Sharding(rank, ranks)
    return make_partition(model, groups, align=align, persistence_threshold=100_000, offloaded=True, sharding=sharding)


def test_no_rank_writes_more_than_its_share(model) -> None:
    total = sum(param.numel() for param in model.parameters())
    assert total > 1e12
    for rank in SAMPLED:
        partition = partition_of(model, rank, 512)
        own = sum(part.stop - part.start for unit in partition.units for part in partition.parts(unit))
        assert own <= total / 512 * 1.01


def test_no_rank_of_another_number_reads_more_than_its_share(model) -> None:
    """In whole blocks: 384 ranks load what 512 saved."""
    total = sum(param.numel() for param in model.parameters()) * BYTES
    saved = partition_of(model, 0, 512)
    stored = dict(stored_tensors(saved, 512))
    for rank in SAMPLED:
        loading = partition_of(model, rank, 384)
        read = 0
        for unit in loading.units:
            for part in loading.parts(unit):
                for found, low, high in stored[part.info.name].overlapping(part.param.start, part.param.stop):
                    read += 3 * bytes_in_blocks(found, low, high)
        assert read <= total / 384 * 1.01


def bytes_in_blocks(part: TensorPart, low: int, high: int) -> int:
    first = low * 4 // BLOCK_BYTES * BLOCK_BYTES
    last = min(-(-high * 4 // BLOCK_BYTES) * BLOCK_BYTES, part.numel * 4)
    return last - first


def stored_tensors(partition: Partition, ranks: int) -> Iterator[tuple[str, StoredTensor]]:
    """The master of every parameter, as so many ranks wrote it."""
    for unit in partition.units:
        parts: dict[str, list[TensorPart]] = {info.name: [] for info in unit.params}
        for rank in range(ranks):
            for part in unit.parts(Sharding(rank, ranks)):
                parts[part.info.name].append(TensorPart(f"{rank}", 0, part.stop - part.start, array("I")))
        for info in unit.params:
            yield info.name, StoredTensor("F32", info.shape, tuple(parts[info.name]))
