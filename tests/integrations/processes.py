"""Scripts in processes of their own, as `infinity run` starts them, or by themselves, which is faster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from infinity.integrations.as_deepspeed import FOLDER
from tests import prepared
from tests.behaviour.ranks import free_port
from tests.prepared import ROOT

TIMEOUT_S = 240
_OWN_PATH = os.environ.get("PYTHONPATH", "")


def run(*arguments: str | Path, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`infinity run ...`, whatever becomes of it."""
    return _python(["-m", "infinity.cli.main", "run", *arguments], where)


def script(*arguments: str | Path, namespace: bool = True, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script as the one rank that `infinity run` would start, with or without its `deepspeed`."""
    return ranks(1, *arguments, namespace=namespace, where=where)


def ranks(
    size: int, *arguments: str | Path, namespace: bool = True, where: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A script as the ranks that `infinity run` would start: rank 0's end, or that of the first which failed."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    found = _environment([FOLDER, ROOT] if namespace else [ROOT]) | meeting | sizes
    of_ranks = [found | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    with ExitStack() as last:
        children = [last.enter_context(prepared.Child(arguments, cwd=where, env=env)) for env in of_ranks]
        ended = []
        for child in children:
            output, errors = child.communicate(TIMEOUT_S)
            ended.append(subprocess.CompletedProcess(child.args, child.wait(), output, errors))
    return next((done for done in ended if done.returncode), ended[0])


def plainly(*arguments: str | Path, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script that is no rank, and starts ranks of its own."""
    return _python(arguments, where)


def output(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stderr[-8000:]
    return ended.stdout


def result(ended: subprocess.CompletedProcess[str]) -> Any:
    """What a script, or its rank 0, printed as JSON behind the word RESULT."""
    (line,) = (line for line in output(ended).splitlines() if line.startswith("RESULT "))
    return json.loads(line[len("RESULT ") :])


def _environment(path: list[Path]) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), _OWN_PATH])}


def _python(arguments: Any, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=where,
        timeout=TIMEOUT_S,
        env=_environment([ROOT]),
        check=False,
    )
