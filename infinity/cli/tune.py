"""`infinity tune`: find the fastest configuration for a model on this machine."""

from __future__ import annotations

import argparse

from infinity.cli.arguments import duration_argument, name_argument, path_argument, size_argument
from infinity.cli.packages import needed_packages
from infinity.cli.terminal import unwind_on_signals

_KNOBS = ("placement", "state_format", "schedule", "tile", "aio", "batch", "memory")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest configuration for a model on this machine",
        description="Measures short runs of the model, each in a process of its own, the given configuration first. "
        "Batch, optimizer, precision and exact state formats do not change. Ctrl-C writes the best configuration so "
        "far; --resume continues.",
    )
    parser.add_argument("config", type=path_argument, help="configuration to start from (JSON)")
    parser.add_argument("--model", type=name_argument, required=True, help="as in `infinity train --model`")
    parser.add_argument("--out", type=path_argument, required=True, help="file for the tuned configuration")
    parser.add_argument("--budget", type=duration_argument, default=300.0, help="time of the search (default 5m)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a sample (default 256)")
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="keep only the inputs of blocks, and recompute"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--steps", type=int, default=4, help="measured steps of a run, after two for warm-up (fewer if steps are long)"
    )
    limits = parser.add_argument_group("limits (default: those of the configuration, and the free memory)")
    limits.add_argument("--host-memory", type=size_argument, help="upper limit of tiering.host_memory")
    limits.add_argument("--device-memory", type=size_argument, help="upper limit of tiering.device_memory")
    limits.add_argument("--max-disk", type=size_argument, help="upper limit of swap files")
    limits.add_argument("--keep", choices=_KNOBS, action="append", default=[], help="do not change this; repeatable")
    limits.add_argument("--allow-lossy", action="store_true", help="also try state formats that round moments")
    parser.add_argument(
        "--profile", type=path_argument, help="the file of `infinity profile --output`, instead of measuring"
    )
    parser.add_argument("--resume", action="store_true", help="continue the search of this --out")
    parser.add_argument("--html", type=path_argument, help="write a report with plots, one page, to this file")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, write and report. Return the exit code."""
    unwind_on_signals()
    with needed_packages("tune"):
        from infinity.cli.tuning.command import tune
    return tune(args)
