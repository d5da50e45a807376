"""Runs a function in several processes that form a group, and brings back what each returned."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT_S = 60

# Ranks are forked off a process that has imported what they need and has run nothing of it: a start takes milliseconds.
# `transformers` imports its models when they are asked for, as the reference does, which takes seconds.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["infinity.setup", "tests.behaviour.reference", "pytest", __name__])


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    path: Path,
    timeout_s: float = 240,
    killed: Collection[int] = (),
) -> list[Any]:
    """What `function(*args)` returned on each rank; None of those that are killed.

    Args:
        function: of a module that can be imported.
        path: a directory for files that the processes share.
        killed: ranks that end by a signal.

    Raises:
        AssertionError: a rank failed (with its traceback), or they did not finish in time.
    """
    processes = [
        _CONTEXT.Process(target=_run, args=(rank, size, str(path), function, args), daemon=True) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
        errors = [file.read_text() for file in sorted(path.glob("error-*"))]
        assert not errors, "\n".join(errors)
        codes = [process.exitcode for process in processes]
        assert all(code == (-signal.SIGKILL if rank in killed else 0) for rank, code in enumerate(codes)), codes
    finally:
        for process in processes:
            process.kill()
    return [None if rank in killed else torch.load(path / f"result-{rank}", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, path: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        torch.save(function(*args), Path(path) / f"result-{rank}")
    except BaseException:
        (Path(path) / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # the others may wait for this rank
    dist.destroy_process_group()
