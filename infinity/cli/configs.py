"""`infinity configs`: list the ready configurations, or print one."""

from __future__ import annotations

import argparse
import json

from infinity.cli.ready import ready_configuration, ready_configurations
from infinity.config import Config, format_size, load_config
from infinity.config.read import read_text


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "configs",
        help="list the ready configurations, or print one",
        description="`--config NAME` of the other commands takes these names.",
    )
    parser.add_argument("name", nargs="?", help="print this configuration")
    parser.add_argument("--json", action="store_true", help="names and paths as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the list or a file. Return the exit code."""
    if args.name is not None:
        print(read_text(ready_configuration(args.name)), end="")
        return 0
    ready = ready_configurations()
    if args.json:
        print(json.dumps({name: str(path) for name, path in ready.items()}))
        return 0
    width = max(map(len, ready))
    for name, path in ready.items():
        print(f"{name:<{width}}  {_summary(load_config(path))}")
    print("\nUse one: infinity train --config NAME --nvme DIR. Print one: infinity configs NAME > mine.json")
    return 0


def _summary(config: Config) -> str:
    """Describe in one line where the configuration stores the states."""
    zero, tiering = config.zero, config.tiering
    places = {"none": "on the device", "cpu": "in host memory", "nvme": "on NVMe"}
    parts = [f"stage {zero.stage}", config.precision]
    params, states = zero.offload_param.device, zero.offload_optimizer.device
    parts.append(
        f"all states {places[states]}"
        if params == states
        else f"parameters {places[params]}, optimizer states {places[states]}"
    )
    if tiering.host_memory_bytes is not None:
        parts.append(f"host_memory {format_size(tiering.host_memory_bytes)}")
    if tiering.accumulation == "layer":
        parts.append("micro-batches layer by layer")
    return ", ".join(parts)
