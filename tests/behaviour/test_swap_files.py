"""Swap files are private, reserved up front, and never left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers.swap_file import adopt_owned, create_owned
from tests.behaviour.disks import mounted
from tests.behaviour.reference import Placement, Recipe, batches, loss_of, tiny_gpt2
from tests.prepared import Child, run

RECIPE = Recipe("bf16")

_RUN = """
import json, sys, time
from pathlib import Path
from tests.behaviour.reference import batches, loss_of, tiny_gpt2
import infinity

engine, *_ = infinity.initialize(model=tiny_gpt2(), config=json.loads(sys.argv[1]))
for ids in batches(2):
    engine.backward(loss_of(engine, ids))
    engine.step()
print("ready", flush=True)
if sys.argv[2] == "exit":
    sys.exit(0)
if sys.argv[2] == "raise":
    raise RuntimeError("on purpose")
time.sleep(60)
"""


_AMID_UPDATES = """
import atexit, json, sys, time
import torch
from torch import nn
import infinity
from infinity.optim import pipeline

config, ending = sys.argv[1:]
if ending == "synchronize":
    atexit.register(lambda: engine.synchronize())  # runs after what initialize registers
    update = pipeline.update
    pipeline.update = lambda *args, **options: (time.sleep(0.01), update(*args, **options))[1]  # so that some are left
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12)))
engine, *_ = infinity.initialize(model=model, config=json.loads(config))
engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).sum())
engine.step()
if ending == "raise":
    raise RuntimeError("on purpose")
"""


def start(path: Path, ending: str) -> Child:
    config = json.dumps(RECIPE.config(Placement("nvme", "nvme", path)))
    process = Child(["-c", _RUN, config, ending], clears=ending in ("exit", "raise"))
    assert process.stdout.readline().strip() == "ready", process.communicate()[1]
    return process


def end(process: Child) -> int:
    process.communicate(timeout=60)
    return process.wait()


@pytest.mark.parametrize("ending", ["exit", "raise"])
def test_no_swap_file_remains_after_the_process_ends(ending, tmp_path) -> None:
    end(start(tmp_path, ending))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("ending", "code"), [("exit", 0), ("raise", 1), ("synchronize", 0)])
def test_a_process_may_end_while_units_are_updated(ending, code, tmp_path) -> None:
    config = json.dumps(RECIPE.config(Placement("nvme", "nvme", tmp_path, host_memory="96MiB")))
    done = run(["-c", _AMID_UPDATES, config, ending], timeout=60, clears=True)
    assert done.returncode == code, done.stderr
    assert ("on purpose" in done.stderr) == (ending == "raise")
    assert ("call engine.close() before it ends" in done.stderr) == (ending == "synchronize"), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_swap_file_remains_after_a_signal(number, tmp_path) -> None:
    process = start(tmp_path, "wait")
    assert list(tmp_path.iterdir())
    process.send_signal(number)
    assert end(process) in (-number, 1, 128 + number)
    assert not list(tmp_path.iterdir())


def test_a_file_left_by_kill_9_is_removed_at_the_next_start_and_a_living_ones_is_not(tmp_path) -> None:
    living = start(tmp_path, "wait")
    dead = start(tmp_path, "wait")
    dead.kill()
    end(dead)
    assert len(list(tmp_path.iterdir())) == 2
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path))
    with infinity.initialize(model=tiny_gpt2(), config=config)[0]:
        assert len(list(tmp_path.iterdir())) == 2  # the living one's, and ours
    assert len(list(tmp_path.iterdir())) == 1
    living.terminate()
    end(living)
    assert not list(tmp_path.iterdir())


def test_swap_files_are_private_and_reserved(tmp_path) -> None:
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path))
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        (file,) = tmp_path.iterdir()
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_blocks * 512 >= file.stat().st_size
        assert file.stat().st_size >= engine.stats().peak_bytes.get("nvme", 0)


def test_a_path_without_permission_is_named(tmp_path) -> None:
    """Root may write anywhere, so the file system itself must refuse."""
    with mounted(tmp_path / "readonly", "ro") as mount:
        config = RECIPE.config(Placement("nvme", "nvme", mount))
        with pytest.raises(infinity.StorageError, match="cannot create a swap file here") as refused:
            infinity.initialize(model=tiny_gpt2(), config=config)
        assert refused.value.errno == errno.EROFS


def test_a_full_disk_is_refused_at_the_start_and_leaves_nothing(tmp_path) -> None:
    with mounted(tmp_path / "small", "size=128k") as mount:
        config = RECIPE.config(Placement("nvme", "nvme", mount))
        with pytest.raises(infinity.StorageError, match=r"cannot reserve \d+ bytes.*bytes are free") as refused:
            infinity.initialize(model=tiny_gpt2(), config=config)
        assert refused.value.errno == errno.ENOSPC
        assert not list(mount.iterdir())


def test_a_capacity_that_is_too_small_is_refused(tmp_path) -> None:
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path))
    config["tiering"]["nvme"][0]["capacity"] = "100KiB"
    with pytest.raises(infinity.StorageError, match=r"no room for .* more of the model") as refused:
        infinity.initialize(model=tiny_gpt2(), config=config)
    assert refused.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_several_paths_share_the_states(tmp_path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path, "64KiB"))
    config["tiering"]["nvme"] = [{"path": str(path)} for path in paths]
    with infinity.initialize(model=tiny_gpt2(), config=config)[0] as engine:
        sizes = [next(path.iterdir()).stat().st_size for path in paths]
        assert min(sizes) > 0.5 * max(sizes)
        engine.backward(loss_of(engine, batches(1)[0]))
        engine.step()
    assert not any(list(path.iterdir()) for path in paths)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.ReLU(), "no floating-point parameters"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), "nothing to train"),
        (lambda: nn.Linear(4, 4).double(), "`weight` is float64"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(build, message, tmp_path) -> None:
    with pytest.raises(infinity.ConfigError, match=message):
        infinity.initialize(model=build(), config=RECIPE.config(Placement("nvme", "nvme", tmp_path)))
    assert not list(tmp_path.iterdir())


def test_an_io_error_while_training_reaches_the_loop_and_cleans_up(tmp_path) -> None:
    """The swap file is truncated under the engine."""
    config = RECIPE.config(Placement("nvme", "nvme", tmp_path, "64KiB", host_memory="700KiB"))
    engine, *_ = infinity.initialize(model=tiny_gpt2(), config=config)
    (file,) = tmp_path.iterdir()
    os.truncate(file, 0)

    def train() -> None:
        for ids in batches(4):
            engine.backward(loss_of(engine, ids))
            engine.step()
        engine.synchronize()

    with pytest.raises(infinity.StorageError, match="end of the file"):
        train()
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 20
    assert not list(tmp_path.iterdir())
    assert torch.isnan(next(engine.module.parameters())).all()


def test_a_child_that_is_terminated_leaves_its_parents_files(tmp_path) -> None:
    """As a data loader's workers are, which inherit the handler of the signal."""
    script = f"""
import os, signal, sys, time
from pathlib import Path
from infinity.config import NvmeConfig
from infinity.io import IoOptions
from infinity.tiers import open_swap

space = open_swap([NvmeConfig(Path({str(tmp_path)!r}))], IoOptions(), "threads")
space.reserve(4096)
space.create()
child = os.fork()
if child == 0:
    time.sleep(60)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
assert len(space.files()) == 1 and space.files()[0].exists()
space.close()
"""
    run(["-c", script], check=True, timeout=60)
    assert not list(tmp_path.iterdir())


def test_a_child_does_not_keep_the_lock_of_kept_states(tmp_path) -> None:
    """As the workers of a data loader, which outlive an engine with tiering.crash_consistent."""
    kept = create_owned(tmp_path, 0, 4096)
    kept.keep("kept")
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        kept.remove()
        adopt_owned(tmp_path, "kept", 4096, 4096).remove()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
