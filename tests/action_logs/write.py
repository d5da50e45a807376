"""Write the golden logs anew: `python -m tests.action_logs.write [CASE ... | --device]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.action_logs.cases import CASES, ON_DEVICE, log_of
from tests.action_logs.worlds import WORLDS
from tests.behaviour.ranks import run_ranks

GOLDEN = Path(__file__).parent / "golden"


def logs_of(name: str, world: str) -> str:
    """Of a case on all its ranks; the process has no other engine."""
    ranks = (CASES | ON_DEVICE)[name].ranks
    if ranks == 1:
        return log_of(name, world)
    with tempfile.TemporaryDirectory() as path:
        each = run_ranks(ranks, log_of, name, world, path=Path(path))
    return "".join(f"# rank {rank}\n{log}" for rank, log in enumerate(each))


def golden(name: str, world: str) -> Path:
    return GOLDEN / f"{name}.{world}.txt"


def main(names: list[str]) -> None:
    """Of these cases; of all on the CPU by default, or of those on an emulated device: `--device`."""
    GOLDEN.mkdir(exist_ok=True)
    if names == ["--device"]:
        from tests.device import simdev  # noqa: PLC0415  (it becomes the process's accelerator)

        simdev.load()
        names = list(ON_DEVICE)
    for name in names or CASES:
        for world in WORLDS:
            golden(name, world).write_text(logs_of(name, world))
            print(name, world)


if __name__ == "__main__":
    main(sys.argv[1:])
