"""Results of `infinity bench-io` as facts, and facts as lines."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from infinity.cli.disk.job import Job
from infinity.io import IoOptions
from infinity.io.bench import BenchRun
from infinity.io.latency import NO_LATENCIES, Latencies

VERSION = 2
Facts = dict[str, Any]

# Facts #


def setting_facts(options: IoOptions, backend: str) -> Facts:
    """How blocks are moved."""
    facts: Facts = {
        "backend": backend,
        "block_size_bytes": options.block_size_bytes,
        "queue_depth": options.queue_depth,
    }
    return facts | ({"threads": options.threads} if backend != "io_uring" else {})


def run_facts(runs: Sequence[BenchRun]) -> Facts:
    """Rates, processor time and latency of some runs of one thing."""
    latencies = _latencies(runs)
    return {
        "runs": len(runs),
        "moved_bytes": sum(run.nbytes for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "bytes_per_s": _spread(run.bytes_per_s for run in runs),
        "iops": _spread(run.blocks_per_s for run in runs),
        "cpu_s_per_gb": statistics.median(run.cpu_s_per_gb for run in runs),
        "cpu_parts_s_per_gb": _cpu_parts(runs),
        "latency": {
            kind: {"samples": seen.samples, **_seconds_keys(seen.percentiles_s())}
            for kind, seen in (("read", latencies.read), ("write", latencies.write))
            if seen.samples
        },
    }


def fio_facts(ours: Sequence[BenchRun], theirs: Sequence[BenchRun], command: Sequence[str]) -> Facts:
    """fio's runs, and ours beside them; runs were in turn, so that ratios are taken within a pair."""
    pairs = list(zip(ours, theirs, strict=True))
    ratios = {
        "bytes_per_s": statistics.median(us.bytes_per_s / fio.bytes_per_s for us, fio in pairs),
        "cpu_s_per_gb": statistics.median(us.cpu_s / fio.cpu_s if fio.cpu_s else 1.0 for us, fio in pairs),
    }
    return {
        "fio": {**run_facts(theirs), "command": list(command)},
        "fio_ratio": ratios | latency_ratios(_latencies(ours), _latencies(theirs)),
    }


def latency_ratios(ours: Latencies, theirs: Latencies) -> dict[str, float]:
    """Of the percentiles that both have, by name: read_p50 and so on."""
    found = {}
    for kind, us, them in (("read", ours.read, theirs.read), ("write", ours.write, theirs.write)):
        known = them.percentiles_s()
        for name, value in us.percentiles_s().items():
            if known.get(name):
                found[f"{kind}_{name}"] = value / known[name]
    return found


def _latencies(runs: Sequence[BenchRun]) -> Latencies:
    latencies = NO_LATENCIES
    for run in runs:
        latencies = latencies.plus(run.latencies)
    return latencies


def _seconds_keys(percentiles_s: dict[str, float]) -> dict[str, float]:
    return {f"{name}_s": value for name, value in percentiles_s.items()}


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _cpu_parts(runs: Sequence[BenchRun]) -> dict[str, float]:
    """User and system; and what the thread that submits took, and the engine's threads, which serve completions."""
    gigabytes = sum(run.nbytes for run in runs) / 1e9
    parts = {"user": sum(run.user_s for run in runs), "system": sum(run.system_s for run in runs)}
    callers = [run.caller_s for run in runs if run.caller_s is not None]
    if callers:
        parts["caller"] = sum(callers)
        parts["engine"] = max(0.0, sum(run.cpu_s for run in runs) - sum(callers))
    return {name: seconds / gigabytes for name, seconds in parts.items()}


# Lines #


def show(facts: Facts, job: Job) -> None:
    """Print one result, for people or as a line of JSON."""
    if job.json:
        print(json.dumps({"version": VERSION, **facts}), flush=True)
        return
    note = "  INTERRUPTED, of what was measured until then" if facts.get("interrupted") else ""
    print(
        f"{facts['op']}: {facts['backend']}, {block_text(facts['block_size_bytes'])} x {facts['queue_depth']}, "
        f"{facts['path']}{note}"
    )
    _show_runs("", facts)
    if "fio" in facts:
        _show_runs("fio ", facts["fio"])
        ratios = facts["fio_ratio"]
        latency = "  ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in list(ratios.items())[2:])
        print(
            f"  {'ratio':<11}{ratios['bytes_per_s']:.3f} of fio, with {ratios['cpu_s_per_gb']:.2f} of its CPU"
            f"{f'; latency: {latency}' if latency else ''} (medians of runs in turn)"
        )
    if "verified_bytes" in facts:
        print(f"  {'verified':<11}{facts['verified_bytes'] / 1e9:.2f} GB were written, read back and compared")
    for warning in facts.get("warnings", ()):
        print(f"  {'note':<11}{warning}")
    print(end="", flush=True)


def show_together(facts: Facts, job: Job) -> None:
    """Print what all paths gave at once."""
    if job.json:
        print(json.dumps({"version": VERSION, **facts}), flush=True)
        return
    print(f"{facts['op']}: all {len(facts['paths'])} paths at once")
    _show_runs("", facts)
    for place in facts["paths"]:
        print(
            f"  {'of that':<11}{place['bytes_per_s'] / 1e9:.2f} GB/s from {place['path']}, "
            f"which alone gave {place['alone_bytes_per_s'] / 1e9:.2f}"
        )
    print(f"  {'striping':<11}{facts['share_of_sum']:.0%} of what they give one by one")
    for warning in facts["warnings"]:
        print(f"  {'note':<11}{warning}")
    print(end="", flush=True)


def _show_runs(whose: str, facts: Facts) -> None:
    rate = {name: value / 1e9 for name, value in facts["bytes_per_s"].items()}
    print(
        f"  {whose + 'bw':<11}{rate['median']:.2f} GB/s (min {rate['min']:.2f}, max {rate['max']:.2f})"
        f"  {facts['iops']['median']:,.0f} IOPS"
    )
    parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in facts["cpu_parts_s_per_gb"].items())
    print(f"  {whose + 'cpu':<11}{facts['cpu_s_per_gb']:.3f} s/GB ({parts})")
    for kind, seen in facts["latency"].items():
        known = "  ".join(
            f"{name.removesuffix('_s')} {value * 1e3:.2f} ms" for name, value in seen.items() if name != "samples"
        )
        print(f"  {whose + kind:<11}{known or 'too few blocks for a percentile'}  ({seen['samples']:,} blocks)")


def block_text(nbytes: int) -> str:
    """128 KiB, 4 MiB."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 and not nbytes % (1 << 20) else f"{nbytes >> 10} KiB"
