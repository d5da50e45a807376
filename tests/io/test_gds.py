"""Reads into device memory, by a reader whose device is the host."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from infinity.errors import StorageError
from infinity.io.gds import DeviceReads, HostReader


class ShortReader(HostReader):
    """As the system, which reads at most 2 GiB at a time."""

    def read(self, path: Path, offset: int, target: torch.Tensor) -> int:
        return super().read(path, offset, target[:1000])


def test_short_reads_are_continued(tmp_path) -> None:
    path, stored = tmp_path / "f", torch.randint(256, (5000,), dtype=torch.uint8)
    path.write_bytes(stored.numpy().tobytes())
    reads, target = DeviceReads(ShortReader()), torch.zeros(4500, dtype=torch.uint8)
    assert reads.start([(path, 2000, 3000), (path, 0, 1500)], target, lambda: None).result() == 4500
    assert torch.equal(target, torch.cat([stored[2000:], stored[:1500]]))
    beyond = reads.start([(path, 3000, 4500)], target, lambda: None)
    with pytest.raises(StorageError, match="read reached the end of the file") as ended:
        beyond.result()
    assert (ended.value.errno, ended.value.offset) == (errno.ENODATA, 5000)
    reads.close()
