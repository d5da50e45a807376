"""`infinity profile`: measure the rates of this machine in about a minute."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from infinity.cli.arguments import check_directory, check_file, check_least, drive_paths, path_argument, size_argument
from infinity.cli.terminal import unwind_on_signals
from infinity.config import format_size, load_config, write_json
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.profiling import ProfileJob


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure drives, host link, optimizer, memory, matrix products and collectives",
        description="Takes about a minute. Under `infinity run --ranks N profile` collectives are measured, too.",
    )
    parser.add_argument("--path", type=path_argument, action="append", help="directory on a drive; can be repeated")
    parser.add_argument(
        "--config", type=path_argument, help="measure the drives of this configuration, with its I/O settings"
    )
    parser.add_argument("--without-drives", action="store_true", help="write to no drive")
    parser.add_argument(
        "--size", type=size_argument, default=512 << 20, help="bytes of the file on each drive (default 512MiB)"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement of a drive (default 2)")
    parser.add_argument("--params", type=int, default=16 << 20, help="number of parameters to update (default 16 Mi)")
    parser.add_argument("--output", type=path_argument, help="write the profile to this file (JSON)")
    parser.add_argument("--json", action="store_true", help="the profile on standard output, instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Return the exit code."""
    from infinity.cli.progress import Progress
    from infinity.profiling import planned_write_bytes, run_profile
    from infinity.zero.ranks import join_ranks

    unwind_on_signals()
    job = _job(args)
    if args.output is not None:
        check_file("--output", args.output)
    for path in job.paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is no directory: give --path DIR on the drive to measure")
        check_directory("--path", path)
    ranks = join_ranks()
    if ranks.rank == 0 and job.paths:
        print(f"writes at most {format_size(planned_write_bytes(job))}", file=sys.stderr)
    with Progress() as progress:
        profile = run_profile(job, ranks, progress.show)
    if ranks.rank == 0:
        if args.output is not None:
            write_json(args.output, profile, "the profile")
        print(json.dumps(profile) if args.json else _table(profile))
    return 0


def _job(args: argparse.Namespace) -> ProfileJob:
    from infinity.io import IoOptions
    from infinity.profiling import ProfileJob

    if args.seconds <= 0:
        raise ConfigError(f"--seconds is {args.seconds}; it must be more than 0")
    check_least(args, 2048, "params")
    config = load_config(args.config or {})
    paths = drive_paths(args.path, config)
    return ProfileJob(
        () if args.without_drives else paths,
        args.size,
        IoOptions.of(config.aio),
        config.tiering.io_backend,
        args.seconds,
        args.params,
    )


# Text output #


def _table(profile: dict[str, Any]) -> str:
    lines = [f"{'drive':<34}{'read':>8}{'write':>8}{'mixed':>8}  GB/s"] if profile["drives"] else []
    for drive in profile["drives"] or ():
        lines.append(_drive_line(drive["path"][-32:], drive))
        lines += [f"  note: {caution}" for caution in drive["cautions"]]
    if profile["drives_together"]:
        lines.append(_drive_line("all at once", profile["drives_together"]))
    lines += _link_lines(profile["link"])
    lines += _processor_lines(profile)
    lines += [
        f"matmul {product['device']} {product['dtype']:<12}{product['flop_per_s'] / 1e12:>9.3f} TFLOP/s "
        f"({product['rows']} rows)"
        for product in profile["matmul"]
    ]
    ranks = profile["ranks"]
    if ranks:
        gather, scatter = (ranks[f"{name}_bytes_per_s"] / 1e9 for name in ("all_gather", "reduce_scatter"))
        who = f"{ranks['count']} ranks ({ranks['backend']})"
        lines.append(f"{who}: all-gather {gather:.2f} GB/s, reduce-scatter {scatter:.2f} GB/s")
    lines += [_contention_line(entry) for entry in profile["contention"] or ()]
    return "\n".join([*lines, f"took {profile['took_s']:.0f} s"])


def _contention_line(entry: dict[str, Any]) -> str:
    rows = f" ({entry['rows']} rows)" if entry["rows"] else ""
    name = f"{entry['part']} beside {' and '.join(entry['beside'])}{rows}"
    return f"{name:<40}{entry['share']:>8.0%}  of its rate alone"


def _drive_line(name: str, rates: dict[str, Any]) -> str:
    cells = [rates[f"{operation}_bytes_per_s"] / 1e9 for operation in ("read", "write", "mixed")]
    return f"{name:<34}" + "".join(f"{cell:>8.2f}" for cell in cells)


def _link_lines(link: dict[str, Any] | None) -> list[str]:
    if link is None:
        return []
    alone = f"{link['to_device_bytes_per_s'] / 1e9:.2f} up, {link['to_host_bytes_per_s'] / 1e9:.2f} down"
    both = f"{link['both_to_device_bytes_per_s'] / 1e9:.2f} and {link['both_to_host_bytes_per_s'] / 1e9:.2f}"
    return [f"link to {link['device']}: {alone}; both at once {both} GB/s"]


def _processor_lines(profile: dict[str, Any]) -> list[str]:
    counts = [memory["threads"] for memory in profile["memory"]]
    lines = [f"{'threads':<34}" + "".join(f"{count:>8}" for count in counts)]
    for name in dict.fromkeys(rates["format"] for rates in profile["optimizer"]):
        found = [rates["params_per_s"] / 1e9 for rates in profile["optimizer"] if rates["format"] == name]
        cells = "".join(f"{rate:>8.2f}" for rate in found)
        lines.append(f"{'optimizer, ' + name:<34}{cells}  G params/s")
    for key, name in (
        ("triad_bytes_per_s", "memory, triad"),
        ("in_place_bytes_per_s", "memory, in place"),
        ("fresh_bytes_per_s", "memory, new pages"),
    ):
        cells = "".join(f"{memory[key] / 1e9:>8.1f}" for memory in profile["memory"])
        lines.append(f"{name:<34}{cells}  GB/s")
    return lines
