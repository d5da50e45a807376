"""Counts the calls from file to file that a unit costs the compute thread in a step: the path of docs/inside.md.

    python tools/count_hops.py [--blocks N] [--files] DIRECTORY_ON_A_DRIVE

A step of a model of N blocks is traced, with parameters and optimizer states on the drive and room for a third of the
parameters, once it follows a plan. Printed are, over N: the hops (calls of a function of another file of the package),
all calls of functions of the package, and how many files they were in. The optimizer's thread is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import infinity
from benchmarks.overhead import Blocks, config_of
from tests.behaviour.reference import least_memory

ROOT = str(Path(infinity.__file__).parent)
WIDTH = 64


class Trace:
    """Calls within the package, by the files that call and are called."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back  # through torch, contextlib and dataclasses
        source = "torch" if caller is None else caller.f_code.co_filename.removeprefix(ROOT + "/")
        self.calls[source, frame.f_code.co_filename.removeprefix(ROOT + "/")] += 1


def traced_step(blocks: int, path: str) -> Trace:
    config = config_of(path, "nvme")
    config["tiering"]["tile_size"] = "64KiB"
    least = least_memory(Blocks(blocks, WIDTH), config, device="cpu")
    config["tiering"]["host_memory"] = least + 4 * WIDTH * (WIDTH + 1) * blocks // 3
    trace = Trace()
    x = torch.randn(2, WIDTH, requires_grad=True)
    with infinity.initialize(model=Blocks(blocks, WIDTH), config=config, device="cpu")[0] as engine:
        for step in range(4):
            sys.setprofile(trace if step == 3 else None)
            engine.backward(engine(x))
            engine.step()
            sys.setprofile(None)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--files", action="store_true", help="print the calls between every two files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as path:
        calls = traced_step(options.blocks, path).calls
    # Less often than once a unit: what belongs to a step as a whole.
    of_units = {pair: count for pair, count in calls.items() if count >= options.blocks // 2}
    hops = sum(count for (source, target), count in of_units.items() if source != target)
    files = {target for _, target in of_units}
    print(
        f"{hops / options.blocks:.0f} hops and {sum(of_units.values()) / options.blocks:.0f} calls a unit and step, "
        f"through {len(files)} files"
    )
    for (source, target), count in sorted(of_units.items(), key=lambda item: -item[1]) if options.files else ():
        print(f"{count / options.blocks:6.1f}  {source} -> {target}")


if __name__ == "__main__":
    main()
