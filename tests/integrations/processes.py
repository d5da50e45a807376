"""Scripts in processes of their own, as `infinity run` starts them, or by themselves, which is faster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from infinity.integrations.as_deepspeed import FOLDER

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
_OWN_PATH = os.environ.get("PYTHONPATH", "")


def run(*arguments: str | Path, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`infinity run ...`, whatever becomes of it."""
    return _python(["-m", "infinity.cli.main", "run", *arguments], {}, [ROOT], where)


def script(*arguments: str | Path, namespace: bool = True, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script as the one rank that `infinity run` would start, with or without its `deepspeed`."""
    path = [FOLDER, ROOT] if namespace else [ROOT]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return _python(arguments, {"LOCAL_RANK": "0", "WORLD_SIZE": "1", "RANK": "0"} | meeting, path, where)


def plainly(*arguments: str | Path, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A script that is no rank, and starts ranks of its own."""
    return _python(arguments, {}, [ROOT], where)


def output(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stderr[-8000:]
    return ended.stdout


def result(ended: subprocess.CompletedProcess[str]) -> Any:
    """What a script printed as JSON behind the word RESULT."""
    return next(json.loads(line[7:]) for line in output(ended).splitlines() if line.startswith("RESULT "))


def _python(arguments: Any, more: dict[str, str], path: list[Path], where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=where,
        timeout=TIMEOUT_S,
        env=os.environ | more | {"PYTHONPATH": os.pathsep.join([*map(str, path), _OWN_PATH])},
        check=False,
    )
