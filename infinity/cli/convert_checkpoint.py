"""`infinity convert-checkpoint`: write a checkpoint again in another state format."""

from __future__ import annotations

import argparse
import json
import time

from infinity.cli.arguments import path_argument
from infinity.cli.progress import Progress


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("convert-checkpoint", help="write a checkpoint again in another state format")
    parser.add_argument("source", type=path_argument, help="a checkpoint, or a directory of them (its last one)")
    parser.add_argument(
        "target", type=path_argument, help="directory of checkpoints for the new one; may be the source's"
    )
    parser.add_argument("--state-format", required=True, help="fp32, split, master, bf16 or int8")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit code."""
    from infinity.checkpoint import convert  # noqa: PLC0415  (torch takes seconds to load)

    progress, start_s = Progress(), time.perf_counter()
    show = None if args.json else lambda done, total: progress.show("written", done / max(1, total))
    try:
        path = convert(args.source, args.target, state_format=args.state_format, progress=show)
    finally:
        progress.clear()
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    seconds = time.perf_counter() - start_s
    if args.json:
        record = {"path": str(path), "state_format": args.state_format, "bytes": nbytes, "seconds": seconds}
        print(json.dumps(record), flush=True)
    else:
        print(f"{path}: format {args.state_format}, {nbytes:,} bytes, {seconds:.1f} s")
    return 0
