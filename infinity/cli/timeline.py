"""`infinity timeline`: sum up and draw the file that `tiering.timeline` writes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.cli.arguments import path_argument
from infinity.cli.plots import new_figure, save_figure
from infinity.cli.reporting.lanes import COLOURS
from infinity.cli.terminal import plain
from infinity.config import format_size
from infinity.telemetry import Lane
from infinity.telemetry.timeline_summary import Ran, TimelineSum, read_timeline, step_windows, sum_up

_LABELLED_SHARE = 0.05  # of the picture's width; narrower phases have no room for their name


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("timeline", help="sum up and draw a timeline of training steps")
    parser.add_argument("file", type=path_argument, metavar="FILE", help="the file of tiering.timeline")
    parser.add_argument("--steps", type=_steps, metavar="FIRST[-LAST]", help="only these steps (default: all)")
    parser.add_argument(
        "--png", type=path_argument, metavar="OUT", help="draw it; a few steps are enough for a picture"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the sums. Return the exit code."""
    spans = read_timeline(args.file)
    total = sum_up(spans, args.steps)
    if args.json:
        print(json.dumps(_facts(total)))
    else:
        _show(total)
    if args.png:
        _draw(args.png, args.file.name, spans, total)
    return 0


def _steps(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        steps = range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range such as 3-5") from error
    if not steps:
        raise argparse.ArgumentTypeError(f"{text!r} is an empty range; the smaller number comes first")
    return steps


def _facts(total: TimelineSum) -> dict[str, Any]:
    return {
        "steps": total.steps,
        "wall_s": total.wall_s,
        "lanes": {
            lane.value: {
                "busy_s": part.busy_s,
                "share": part.busy_s / total.wall_s,
                "bytes": part.nbytes,
                "bytes_per_s": part.nbytes / part.busy_s,
            }
            for lane, part in total.lanes.items()
        },
        "waits_s": total.waits_s,
    }


def _show(total: TimelineSum) -> None:
    count = len(total.steps)
    print(f"{count} steps, {total.wall_s / count:.3f} s each; a step has on average")
    print(f"{'lane':<16}{'busy':>10}{'share':>8}{'moved':>12}{'GB/s':>8}")
    for lane, part in total.lanes.items():
        line = f"{lane.value:<16}{part.busy_s / count:>8.3f} s{part.busy_s / total.wall_s:>8.0%}"
        if part.nbytes:
            line += f"{format_size(part.nbytes // count):>12}{part.nbytes / part.busy_s / 1e9:>8.2f}"
        print(line)
    for cause, seconds in sorted(total.waits_s.items(), key=lambda item: -item[1]):
        print(
            f"  waits for {plain(cause).replace('_', ' '):<14}{seconds / count:>8.3f} s{seconds / total.wall_s:>8.0%}"
        )


def _draw(path: Path, title: str, spans: Sequence[Ran], total: TimelineSum) -> None:
    """Draw one row for each lane. Spans of a lane that overlap are drawn over each other."""
    windows = step_windows(spans)
    begin_s, end_s = windows[total.steps[0]][0], windows[total.steps[-1]][1]
    lanes = list(total.lanes)
    figure = new_figure("--png", 12, 0.8 + 0.5 * len(lanes))
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        bars = [
            (max(span.start_s, begin_s) - begin_s, min(span.end_s, end_s) - max(span.start_s, begin_s))
            for span in spans
            if span.lane is lane and span.start_s < end_s and span.end_s > begin_s
        ]
        edge = 1.0 if lane is Lane.PHASE else 0.0  # an edge would hide narrow bars
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[lane], edgecolors="white", linewidth=edge)
    for span in spans:
        wide = span.end_s - span.start_s > _LABELLED_SHARE * (end_s - begin_s)
        if span.lane is Lane.PHASE and wide and begin_s <= span.start_s < end_s:
            axes.text(span.start_s - begin_s, lanes.index(Lane.PHASE), f" {span.name}", va="center", clip_on=True)
    for step in total.steps:
        axes.axvline(windows[step][0] - begin_s, color="black", linewidth=0.8)
    labels = [f"{lane.value} {total.lanes[lane].busy_s / total.wall_s:.0%}" for lane in lanes]
    axes.set_yticks(range(len(lanes)), labels)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="seconds", xlim=(0, end_s - begin_s))
    save_figure(figure, "--png", path)
