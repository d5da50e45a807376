"""Drives that acknowledge writes which they lose or tear, or return old data: noticed with checksums.

Each test lets the drive lie once, for one request after the other of a run, and holds the end of the run against one on
an honest drive.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.api.sequences import WIDTH, Blocks
from tests.behaviour.disks import LyingDisk, swap_on

STEPS = 3
LIES = ["lost", "torn", "stale"]


def config(path: Path, schedule: str, accumulation: int, *, checksum: bool) -> dict[str, Any]:
    home = {"device": "nvme"}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0 if schedule == "backward" else 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 100,
            "offload_param": home,
            "offload_optimizer": home,
        },
        "tiering": {
            "nvme": [{"path": str(path)}],
            "update_schedule": schedule,
            "tile_size": 4096,
            "host_memory": 106_496,
            "checksum": checksum,
        },
    }


def trained(path: Path, lie: str, number: int | None, **how: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """The weights after some steps on a drive that lies about the request of this number, and whether it has lied."""
    drives: list[LyingDisk] = []

    def lying(engine: infinity.io.IoEngine) -> LyingDisk:
        drives.append(LyingDisk(engine, lie))
        return drives[-1]

    with pytest.MonkeyPatch.context() as patch:
        swap_on(patch, lying)
        engine, *_ = infinity.initialize(model=Blocks(), config=config(path, **how))
    for drive in drives:
        drive.number = number
    generator = torch.Generator().manual_seed(0)
    with engine:
        for _ in range(STEPS * how["accumulation"]):
            engine.backward(engine(torch.randn(4, WIDTH, generator=generator)))
            engine.step()
        weights = {name: value.clone() for name, value in engine.named_parameters()}
    return weights, any(drive.lied for drive in drives)


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, others[name]) for name, value in some.items())


@pytest.mark.parametrize(("schedule", "accumulation"), [("deferred", 2), ("backward", 1), ("speculative", 1)])
@pytest.mark.parametrize("lie", LIES)
def test_with_checksums_a_lie_is_an_error_or_changes_no_number(lie, schedule, accumulation, tmp_path) -> None:
    how: dict[str, Any] = {"schedule": schedule, "accumulation": accumulation, "checksum": True}
    honest, _ = trained(tmp_path, lie, None, **how)
    errors: list[infinity.StorageError] = []
    for number in range(0, 30, 3):
        try:
            weights, _ = trained(tmp_path, lie, number, **how)
        except infinity.StorageError as error:
            errors.append(error)
        else:
            assert equal(weights, honest), f"request {number}"  # nobody has read what the drive lied about
    assert errors
    for error in errors:
        assert error.errno == errno.EBADMSG
        assert "not those that were written (checksum)" in str(error)
        assert Path(str(error.filename)).parent == tmp_path


@pytest.mark.parametrize("lie", LIES)
def test_without_checksums_a_lie_is_not_noticed(lie, tmp_path) -> None:
    """What docs/io.md says that `tiering.checksum` is for."""
    how: dict[str, Any] = {"schedule": "deferred", "accumulation": 1, "checksum": False}
    honest, _ = trained(tmp_path, lie, None, **how)
    assert any(not equal(trained(tmp_path, lie, number, **how)[0], honest) for number in range(2, 20, 2))
