"""Runs a function in several processes that form a group, and brings back what each returned."""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import prepared

_TIMEOUT_S = 60
_PORTS = range(10_000, 30_000)  # below those that Linux gives to sockets that ask for any
_CALL = f"from {__name__} import run_rank; run_rank()"


def free_port() -> int:
    """A port of this machine for processes that are to meet, which no other program takes before they do."""
    while True:
        port = random.choice(_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


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
    torch.save((function, args), path / "call")
    environment = os.environ | {"LOCAL_WORLD_SIZE": str(size)}
    ranks = [prepared.Child(["-c", _CALL, str(rank), str(size), path], env=environment) for rank in range(size)]
    try:
        codes, said = _ends(ranks, time.monotonic() + timeout_s)
    finally:
        for rank in ranks:
            rank.kill()
    errors = [file.read_text() for file in sorted(path.glob("error-*"))]
    assert not errors, "\n".join(errors)
    wanted = [-signal.SIGKILL if rank in killed else 0 for rank in range(size)]
    assert codes == wanted, f"{codes}: {said}"
    return [None if rank in killed else torch.load(path / f"result-{rank}", weights_only=False) for rank in range(size)]


def _ends(ranks: list[prepared.Child], until_s: float) -> tuple[list[int | None], list[str]]:
    """The exit code of each, None of one that has not ended by then, and what each wrote."""
    codes, said = [], []
    for rank in ranks:
        try:
            said.append("".join(rank.communicate(max(0, until_s - time.monotonic()))))
        except subprocess.TimeoutExpired:
            said.append("not finished in time")
        codes.append(rank.returncode)
    return codes, said


def run_rank() -> None:
    """What each of the processes does."""
    rank, size, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    function, args = torch.load(path / "call", weights_only=False)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        torch.save(function(*args), path / f"result-{rank}")
    except BaseException:
        (path / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)  # the others may wait for this rank
    dist.destroy_process_group()
    atexit._clear()  # of a process that has lost another rank it would make a failure, which is no test's claim here
