"""`infinity report`: show a run as numbers and as a page of HTML."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from infinity.cli.arguments import path_argument
from infinity.cli.pages.document import write_page
from infinity.cli.reporting.page import page
from infinity.cli.reporting.read import RunLines, read_log
from infinity.cli.reporting.summary import summarize
from infinity.cli.terminal import plain
from infinity.errors import ConfigError
from infinity.telemetry.timeline_summary import Ran, read_timeline


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("report", help="show the numbers of a run, and write an HTML page with its curves")
    parser.add_argument(
        "log", type=path_argument, metavar="RUN", help="the file of `infinity train --log`, or the output of --json"
    )
    parser.add_argument(
        "--html", type=path_argument, metavar="OUT", help="the page (default: RUN with .html in place of .jsonl)"
    )
    parser.add_argument(
        "--timeline",
        type=path_argument,
        metavar="FILE",
        help="the file of tiering.timeline (default: the one that the log names)",
    )
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object; no page without --html")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and print the numbers. Return the exit code."""
    found = read_log(args.log)
    summary = summarize(found)
    target = args.html or (None if args.json else args.log.with_suffix(".html"))
    if target is not None:
        if target.exists() and target.samefile(args.log):
            raise ConfigError(f"--html {target} is the log itself: name another file")
        title = f"infinity: {_name(args.log, found)}"
        write_page(target, page(title, found, summary, _timeline(args.timeline, found)))
    if args.json:
        print(json.dumps(asdict(summary)))
        return 0
    rows = summary.rows()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(plain(f"{name:<{width}}  {value}"))
    print(f"written to {target}")
    return 0


def _name(log: Path, found: RunLines) -> str:
    model = found.about.get("model")
    return log.stem if model is None else f"{model} ({log.stem})"


def _timeline(given: Path | None, found: RunLines) -> list[Ran]:
    """Return the given timeline, or the one that the log names if it exists; else an empty list."""
    if given is not None:
        return read_timeline(given)
    told = found.about.get("timeline")
    return read_timeline(Path(told)) if told is not None and Path(told).is_file() else []
