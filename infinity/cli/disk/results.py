"""Results of `infinity bench-io` as JSON values and as text."""

from __future__ import annotations

import json
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from infinity.cli.disk.job import Job
from infinity.io import IoOptions
from infinity.io.bench import BenchRun
from infinity.io.latency import NO_LATENCIES, Latencies

VERSION = 3
_LABEL_CHARS = 11
_INDENT_CHARS = 2
_WHOLE_CHARS = 30  # parts of a line up to this length are not folded
_LEAST_COLUMNS = 40
_MOST_COLUMNS = 100
_NO_BREAK = "\N{NO-BREAK SPACE}"
Facts = dict[str, Any]

# Facts #


def setting_facts(options: IoOptions, backend: str) -> Facts:
    """Return the facts of a setting: how blocks are moved."""
    facts: Facts = {
        "backend": backend,
        "block_size_bytes": options.block_size_bytes,
        "queue_depth": options.queue_depth,
    }
    return facts | ({"threads": options.threads} if backend != "io_uring" else {})


def run_facts(runs: Sequence[BenchRun]) -> Facts:
    """Return rates, processor time and latency over repeated runs."""
    latencies = all_latencies(runs)
    return {
        "runs": len(runs),
        "moved_bytes": sum(run.nbytes for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "bytes_per_s": _spread(run.bytes_per_s for run in runs),
        "iops": _spread(run.blocks_per_s for run in runs),
        "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in runs),
        "cpu_parts_s_per_gb": _cpu_parts(runs),
        "latency": {
            kind: {"samples": seen.samples} | {f"{name}_s": value for name, value in seen.percentiles_s().items()}
            for kind, seen in (("read", latencies.read), ("write", latencies.write))
            if seen.samples
        },
    }


def fio_facts(ours: Sequence[BenchRun], theirs: Sequence[BenchRun], command: Sequence[str]) -> Facts:
    """Return the facts of fio's runs, and the ratios of ours to them: of medians, and of pairs of consecutive runs."""
    us, fio = run_facts(ours), run_facts(theirs)
    pairs = [ours.bytes_per_s / theirs.bytes_per_s for ours, theirs in zip(ours, theirs, strict=True)]
    ratios = {
        "bytes_per_s": us["bytes_per_s"]["median"] / fio["bytes_per_s"]["median"],
        "cpu_s_per_gb": us["cpu_s_per_gb"] / fio["cpu_s_per_gb"] if fio["cpu_s_per_gb"] else 1.0,
    }
    return {
        "fio": {**fio, "command": list(command)},
        "fio_ratio": ratios | latency_ratios(all_latencies(ours), all_latencies(theirs)),
        "fio_pairs": {"min": min(pairs), "max": max(pairs)},
    }


def latency_ratios(ours: Latencies, theirs: Latencies) -> dict[str, float]:
    """Return the ratio of each percentile that both have, by name, such as `read_p50`."""
    found = {}
    for kind, us, them in (("read", ours.read, theirs.read), ("write", ours.write, theirs.write)):
        known = them.percentiles_s()
        for name, value in us.percentiles_s().items():
            if known.get(name):
                found[f"{kind}_{name}"] = value / known[name]
    return found


def all_latencies(runs: Sequence[BenchRun]) -> Latencies:
    """Return the latencies of the blocks of all runs."""
    latencies = NO_LATENCIES
    for run in runs:
        latencies = latencies.plus(run.latencies)
    return latencies


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _cpu_parts(runs: Sequence[BenchRun]) -> dict[str, float]:
    """Return processor seconds per GB: user, system; the submitting thread ("caller"), and the engine's threads."""
    gigabytes = sum(run.nbytes for run in runs) / 1e9
    parts = {"user": sum(run.user_s for run in runs), "system": sum(run.system_s for run in runs)}
    callers = [run.caller_s for run in runs if run.caller_s is not None]
    if callers:
        parts["caller"] = sum(callers)
        parts["engine"] = max(0.0, sum(run.cpu_s for run in runs) - sum(callers))
    return {name: seconds / gigabytes for name, seconds in parts.items()}


# Lines #


def show(facts: Facts, job: Job) -> None:
    """Print one result, as text or as a line of JSON."""
    if job.json:
        print(json.dumps({"version": VERSION, **facts}), flush=True)
        return
    if "paths" in facts:
        _show_together(facts)
    else:
        _show_one(facts)
    for warning in facts.get("warnings", ()):
        _row("note", warning)
    print(end="", flush=True)


def _show_one(facts: Facts) -> None:
    note = "  INTERRUPTED: a partial result" if facts.get("interrupted") else ""
    print(
        f"{facts['op']}: {facts['backend']}, {block_text(facts['block_size_bytes'])} x {facts['queue_depth']}, "
        f"{facts['path']}{note}"
    )
    both = [facts, facts["fio"]] if "fio" in facts else [facts]
    unit = _unit(min(one["bytes_per_s"]["median"] for one in both))
    _show_runs("", facts, unit)
    if "fio" in facts:
        _show_runs("fio ", facts["fio"], unit)
        _show_ratios(facts)
    if "verified_bytes" in facts:
        _row("verified", f"{facts['verified_bytes'] / 1e9:.2f} GB were written, read back and compared")


def _show_together(facts: Facts) -> None:
    """Print the result of all paths at once."""
    print(f"{facts['op']}: all {len(facts['paths'])} paths at once")
    _show_runs("", facts, _unit(facts["bytes_per_s"]["median"]))
    for place in facts["paths"]:
        _row(
            "of that",
            f"{place['bytes_per_s'] / 1e9:.2f} GB/s from {place['path']}, "
            f"with {place['alone_bytes_per_s'] / 1e9:.2f} alone",
        )
    _row("striping", f"{facts['share_of_sum']:.0%} of the sum of their rates alone")


def _unit(bytes_per_s: float) -> tuple[float, str]:
    """Return the unit for rates that are shown together, of which this is the lowest: its bytes and its name."""
    return (1e9, "GB/s") if bytes_per_s >= 1e8 else (1e6, "MB/s")


def _show_runs(whose: str, facts: Facts, unit_of_rates: tuple[float, str]) -> None:
    unit_bytes, unit = unit_of_rates
    rate = {name: value / unit_bytes for name, value in facts["bytes_per_s"].items()}
    _row(
        f"{whose}bw",
        f"{rate['median']:.2f} {unit}",
        f"(min {rate['min']:.2f}, max {rate['max']:.2f} of {facts['runs']})",
        f"{facts['iops']['median']:,.0f} IOPS",
    )
    parts = [f"{name} {seconds:.3f}" for name, seconds in facts["cpu_parts_s_per_gb"].items()]
    _row(f"{whose}cpu", f"{facts['cpu_s_per_gb']:.3f} s/GB", *parts)
    for kind, seen in facts["latency"].items():
        known = [f"{name.removesuffix('_s')} {value * 1e3:.2f} ms" for name, value in seen.items() if name != "samples"]
        _row(
            f"{whose}{kind}",
            *(known or ["too few blocks for a percentile"]),
            f"({_count_text(seen['samples'])} blocks)",
        )


def _show_ratios(facts: Facts) -> None:
    """Print the ratios of the values in the lines above."""
    ratios, pairs = facts["fio_ratio"], facts["fio_pairs"]
    _row(
        "ratio",
        f"{ratios['bytes_per_s']:.2f} of fio's bandwidth",
        f"({pairs['min']:.2f} to {pairs['max']:.2f} in pairs of runs)",
        f"{ratios['cpu_s_per_gb']:.2f} of its CPU",
    )
    latency = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in list(ratios.items())[2:]]
    if latency:
        _row("of fio's", *latency)


def _row(label: str, *parts: str) -> None:
    """Print a line of a result, folded between words, but not within a short part, such as a number and its unit."""
    joined = "  ".join(part if len(part) > _WHOLE_CHARS else part.replace(" ", _NO_BREAK) for part in parts)
    print(folded(joined, f"  {label:<{_LABEL_CHARS}}"))


def folded(text: str, begin: str = "") -> str:
    """Fold a text between words to the terminal's width. The first line begins with `begin`, others are indented."""
    lines = textwrap.fill(
        text,
        max(_LEAST_COLUMNS, min(_MOST_COLUMNS, shutil.get_terminal_size().columns)),
        initial_indent=begin,
        subsequent_indent=" " * (len(begin) or _INDENT_CHARS),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_NO_BREAK, " ")


def _count_text(count: int) -> str:
    """Return a count as 6,144 or 3.2 M."""
    return f"{count:,}" if count < 1_000_000 else f"{count / 1e6:.1f} M"


def block_text(nbytes: int) -> str:
    """Return a block size as 128 KiB or 4 MiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 and not nbytes % (1 << 20) else f"{nbytes >> 10} KiB"
