"""A rank that dies brings the others down with a message, and its swap files go with the next run."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.prepared import Child

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
import infinity
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_llama

rank, path, victim = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group(
    "gloo", init_method=f"file://{path}/store{victim}", rank=rank, world_size=2, timeout=timedelta(seconds=50)
)
config = Recipe("bf16").config(Placement("nvme", "nvme", f"{path}/swap"))
engine = infinity.initialize(model=tiny_llama(), config=config)[0]

def die(*_):
    if engine.global_steps == 2 and rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)

engine.module.model.layers[1].register_full_backward_hook(die)
for ids in batches(4):
    engine.backward(loss_of(engine, ids))
    engine.step()
engine.close()
print("finished", flush=True)
dist.destroy_process_group()
"""


def start(ended: ExitStack, path: Path, victim: int) -> list[Child]:
    return [ended.enter_context(Child(["-c", SCRIPT, str(rank), path, str(victim)])) for rank in range(2)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_others_with_a_message(victim, tmp_path) -> None:
    (tmp_path / "swap").mkdir()
    with ExitStack() as ended:
        processes = start(ended, tmp_path, victim)
        processes[victim].communicate(timeout=120)
        died_s = time.monotonic()
        output, errors = processes[1 - victim].communicate(timeout=60)
        assert time.monotonic() - died_s < 60
        assert processes[1 - victim].returncode not in (0, None)
        assert "finished" not in output
        assert "RankError" in errors
        assert "another rank has died or does not answer" in errors
        left = list((tmp_path / "swap").iterdir())
        assert len(left) == 1, left  # the victim could not remove its own
        for process in start(ended, tmp_path, 2):  # nobody is killed
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
        assert not list((tmp_path / "swap").iterdir())
