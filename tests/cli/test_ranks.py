"""Ranks share the samples out, and stop together."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from infinity.cli.training.ranks import agreed, first_sample, rank_and_size
from tests.prepared import Child

SCRIPT = """
import json, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from infinity.cli.training.ranks import agreed, first_sample, rank_and_size

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
)
cpu = torch.device("cpu")
stops = [agreed(signum, cpu) for signum in (0, 15 if rank == size - 1 else 0)]
print(json.dumps([rank_and_size(), first_sample(100, 4), stops]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_turns_at_the_samples_and_agree_on_a_signal(size, tmp_path) -> None:
    starts = [["-c", SCRIPT, str(rank), str(size), tmp_path / "store"] for rank in range(size)]
    with ExitStack() as ended:
        processes = [ended.enter_context(Child(start)) for start in starts]
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
            assert json.loads(output) == [[rank, size], 100 + 4 * rank, [0, 15]]


def test_one_process_needs_no_group() -> None:
    assert rank_and_size() == (0, 1)
    assert first_sample(100, 4) == 100
    assert agreed(2, None) == 2  # type: ignore[arg-type]  # the device is not looked at
