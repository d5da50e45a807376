"""A save that the machine ends: a process killed anywhere in it, a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import infinity
from infinity.checkpoint.runs import LOCK
from tests import prepared
from tests.behaviour.reference import Placement, batches, train_on
from tests.checkpoint.common import make_engine

ROOT = Path(__file__).parents[2]
EVENTS = range(1, 40, 3)


def names(directory: Path) -> list[str]:
    """What is there beside the lock that a run holds."""
    return sorted(path.name for path in directory.iterdir() if path.name != LOCK)


def test_kill_9_in_a_save_of_an_engine_leaves_a_whole_checkpoint(tmp_path) -> None:
    """The process dies at its n-th operation on files while it replaces the checkpoint of step 1 by that of step 2."""
    script = """
import os, signal, sys
from pathlib import Path

import torch

from tests.behaviour.reference import Placement, batches
from tests.behaviour.reference import train_on
from tests.checkpoint.common import make_engine

torch.set_num_threads(1)
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree")
armed = False
count = 0

def audit(event, args):
    global count
    if armed and event in EVENTS and ".tmp" in str(args):
        count += 1
        if count == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(audit)
for text in sys.argv[2:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    fatal = int(text)
    directory = Path(sys.argv[1]) / text
    with make_engine(Placement()) as engine:
        train_on(engine, batches(1))
        engine.save_checkpoint(directory, tag="tag")
        train_on(engine, batches(1))
        armed = True
        engine.save_checkpoint(directory, tag="tag")
        armed = False
    os._exit(0)
"""
    prepared.run(["-c", script, tmp_path, *map(str, EVENTS)], check=True)
    weights = {}
    with make_engine(Placement()) as engine:
        for step in (1, 2):
            train_on(engine, batches(1))
            weights[step] = dict(engine.named_parameters())
    found = []
    with make_engine(Placement(), seed=5) as engine:
        for event in EVENTS:
            path, _ = engine.load_checkpoint(tmp_path / str(event))
            assert path == tmp_path / str(event) / "tag"
            found.append(engine.global_steps)
            for name, value in engine.named_parameters():
                assert torch.equal(value, weights[engine.global_steps][name]), name
            engine.save_checkpoint(tmp_path / str(event), tag="next")
            assert names(tmp_path / str(event)) == ["latest", "next", "tag"]
    assert found[0] == 1
    assert found[-1] == 2, "EVENTS end before the save does"


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(small_disk) -> None:
    with make_engine(Placement()) as engine:
        train_on(engine, batches(1))
        engine.save_checkpoint(small_disk)
        weights = dict(engine.named_parameters())
        train_on(engine, batches(1))
        with pytest.raises(infinity.StorageError, match=r"cannot be written: No space left.*free some space") as full:
            engine.save_checkpoint(small_disk)
        assert full.value.errno == errno.ENOSPC
        assert names(small_disk) == ["global_step1", "latest"]
        train_on(engine, batches(1))  # training goes on
        engine.load_checkpoint(small_disk)
        assert engine.global_steps == 1
        for name, value in engine.named_parameters():
            assert torch.equal(value, weights[name]), name
