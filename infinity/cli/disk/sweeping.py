"""Measures every setting on every path (`--sweep`), prints and plots the results, and writes a configuration."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from infinity.cli.disk.job import Job
from infinity.cli.disk.results import VERSION, Facts, block_text, folded
from infinity.cli.plots import new_figure, save_figure
from infinity.cli.progress import Progress
from infinity.config import format_size, with_values, write_json
from infinity.errors import ConfigError
from infinity.io import IoOptions, Span
from infinity.io.bench import ring_bytes
from infinity.io.patterns import written_share
from infinity.io.sweep import PROBES, SweepProgress, best_for_all, best_point, sweep
from infinity.io.sweep_log import SweepLog
from infinity.io.sweep_plan import BLOCK_SIZES_BYTES, QUEUE_DEPTHS, SweepPlan, SweepPoint, plan_sweep

Key = tuple[Path, str]  # a path and an operation


class Sweeps:
    """The sweeps of one command, planned before anything is written.

    Args:
        resume: a file that stores the measurements; None to store none.

    Raises:
        ConfigError: the files alone exceed --max-write, or `resume` belongs to other options.
    """

    def __init__(self, job: Job, resume: Path | None, memory_bytes: int) -> None:
        self._job = job
        facts = {
            "size_bytes": job.size_bytes,
            "backend": job.backend,
            "threads": job.options.threads,
            "sqpoll": job.options.sqpoll,
            "iopoll": job.options.iopoll,
            "direct": job.options.direct,
            "huge_pages": job.huge_pages,
            "runs": job.runs,
            "seconds": job.runtime_s,
        }
        self._log = SweepLog(resume, facts)
        self._memory_bytes = memory_bytes
        self._plans = {(path, op): self._plan(path, op) for path in job.paths for op in job.operations}

    def _plan(self, path: Path, operation: str) -> SweepPlan:
        job = self._job
        assert job.most_written_bytes is not None  # a sweep always has a limit
        share = written_share(operation)
        shares = len(job.paths) * sum(map(written_share, job.operations))
        left = job.most_written_bytes - job.fill_bytes()
        if left < 0:
            raise ConfigError(
                f"--max-write {format_size(job.most_written_bytes)}: the files alone take "
                f"{format_size(job.fill_bytes())}; raise it or lower --size"
            )
        plan = plan_sweep(
            operation,
            job.size_bytes,
            job.options,
            passes=job.runs,
            seconds=job.runtime_s,
            memory_bytes=self._memory_bytes,
            most_written_bytes=int(left * share / shares) if share else 0,
        )
        before = self._log.pass_bytes(str(path), operation)
        return plan if before is None else replace(plan, pass_bytes=before)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers for the largest setting."""
        return max(ring_bytes(options) for plan in self._plans.values() for options in plan.settings)

    def announce(self) -> None:
        """Print how much will be written.

        Raises:
            ConfigError: with the bytes of earlier runs, this exceeds --max-write.
        """
        written = sum(plan.written_bytes for plan in self._plans.values()) + self._job.fill_bytes()
        before = self._log.written_bytes
        most = self._job.most_written_bytes
        assert most is not None
        count = sum(plan.measurements for plan in self._plans.values())
        again = f", of which {format_size(before)} (and the files once more) were written before" if before else ""
        text = (
            f"sweep: at most {count} measurements of {self._job.runtime_s:g} s, writes at most {format_size(written)}"
            f"{again} (--max-write {format_size(most)})"
        )
        print(folded(text), file=sys.stderr)
        if before and before + self._job.fill_bytes() > most:
            raise ConfigError(f"--max-write {format_size(most)}: {format_size(before)} were written before; raise it")

    def run(self, files: Sequence[Path], buffers: Span) -> dict[Key, Sequence[SweepPoint]]:
        """Measure everything. Return the points of every path and operation."""
        self._log.filled(self._job.fill_bytes())
        under_way = {
            (file.parent, operation): sweep(
                file, self._plans[file.parent, operation], self._job.backend, buffers, self._log
            )
            for file in files
            for operation in self._job.operations
        }
        follower = _Follower()
        with follower.progress.following("", follower.share):
            for key, states in under_way.items():
                self._advance(key, states, follower, PROBES)
            print(f"sweep: takes about {_duration(follower.left_s)} more", file=sys.stderr)
            for key, states in under_way.items():
                self._advance(key, states, follower, None)
                show_points(self._job, self._plans[key], key, follower.points(key))
        return {key: follower.points(key) for key in under_way}

    def _advance(self, key: Key, states: Iterator[SweepProgress], follower: _Follower, until: int | None) -> None:
        """Continue a sweep until it has done `until` measurements, or to its end if None."""
        try:
            for state in states:
                follower.see(key, state)
                if until is not None and state.done >= until:
                    return
        except BaseException:
            follower.progress.clear()
            if points := follower.points(key):
                show_points(self._job, self._plans[key], key, points, interrupted=True)
            raise


class _Follower:
    """Collects the points of all sweeps of a command, and shows their progress and remaining time."""

    def __init__(self) -> None:
        self._seen: dict[Key, SweepProgress] = {}
        self.progress = Progress()
        self._began_s = self._seen_at_s = time.monotonic()

    def see(self, key: Key, state: SweepProgress) -> None:
        """Take the new state of a sweep."""
        self._seen[key] = state
        self._seen_at_s = time.monotonic()
        path, operation = key
        best = f", best {max(point.bytes_per_s for point in state.points) / 1e9:.2f} GB/s" if state.points else ""
        self.progress.say(f"{operation}: {state.done} of {state.total}{best}, {path}")

    def points(self, key: Key) -> Sequence[SweepPoint]:
        """Return the points that a sweep has measured so far."""
        return self._seen[key].points if key in self._seen else ()

    @property
    def left_s(self) -> float:
        """The estimated remaining seconds of all sweeps."""
        left_s = sum(state.left_s for state in self._seen.values())
        return max(0.0, left_s - (time.monotonic() - self._seen_at_s))

    def share(self) -> float:
        """Return the share of the estimated time of all sweeps that has passed, 0 to 1."""
        passed_s = time.monotonic() - self._began_s
        return passed_s / max(passed_s + self.left_s, 1e-9)


def sweep_memory_bytes(available_bytes: int) -> int:
    """Return the limit of the buffers' memory: a quarter of the free memory, at most what the largest setting needs."""
    wanted = max(ring_bytes(IoOptions(block, depth)) for block in BLOCK_SIZES_BYTES for depth in QUEUE_DEPTHS)
    return min(wanted, available_bytes // 4)


# Tables #


def show_points(
    job: Job, plan: SweepPlan, key: Key, points: Sequence[SweepPoint], *, interrupted: bool = False
) -> None:
    """Print a sweep as lines of JSON, or as a table of GB/s."""
    path, operation = key
    best = best_point(points, plan.default)
    if job.json:
        for point in points:
            print(json.dumps(_setting(key, plan, point, point is best, interrupted=interrupted)))
        return
    depths = sorted({point.options.queue_depth for point in points})
    note = ", INTERRUPTED: a partial result" if interrupted else ""
    print(f"{operation} on {path}, GB/s{note}\n{'block':>8} " + " ".join(f"{f'x{depth}':>7}" for depth in depths))
    for block in sorted({point.options.block_size_bytes for point in points}):
        row = {point.options.queue_depth: point for point in points if point.options.block_size_bytes == block}
        cells = [_cell(row.get(depth), best) for depth in depths]
        print(f"{block_text(block):>8} " + " ".join(f"{cell:>7}" for cell in cells))
    print(f"* aio: block_size {best.options.block_size_bytes}, queue_depth {best.options.queue_depth}")
    if plan.default is not None:
        print(folded(_verdict(plan.default, best, points), "  "), flush=True)


def _verdict(default: IoOptions, best: SweepPoint, points: Sequence[SweepPoint]) -> str:
    """Return why the best setting is the default, or by how much it is faster."""
    kept = next((point for point in points if point.options == default), None)
    if kept is None:
        return "the default was not measured"
    if best is not kept:
        rate, other = statistics.median(best.final_rates), statistics.median(kept.final_rates)
        return f"{rate / other:.2f} of the default's {other / 1e9:.2f} GB/s, measured in turn with it"
    if not kept.final_rates:
        return "the default: none is faster"
    finals = [point for point in points if point.final_rates]
    ratio = max(statistics.median(point.final_rates) for point in finals) / statistics.median(kept.final_rates)
    spread = kept.final_spread_bytes_per_s / statistics.median(kept.final_rates)
    return f"the default: none is faster by 15% and the spread (best {ratio:.2f} of it, which varies by {spread:.0%})"


def _cell(point: SweepPoint | None, best: SweepPoint) -> str:
    return "-" if point is None else f"{point.bytes_per_s / 1e9:.2f}{'*' if point is best else ' '}"


def _setting(key: Key, plan: SweepPlan, point: SweepPoint, best: bool, *, interrupted: bool) -> Facts:
    facts: Facts = {
        "version": VERSION,
        "path": str(key[0]),
        "op": key[1],
        "best": best,
        "default": point.options == plan.default,
        "block_size_bytes": point.options.block_size_bytes,
        "queue_depth": point.options.queue_depth,
        "bytes_per_s": point.bytes_per_s,
        "runs_bytes_per_s": list(point.rates),
        "final_runs_bytes_per_s": list(point.final_rates),
    }
    return {**facts, "interrupted": True} if interrupted else facts


# Files #


def plot_all(path: Path, found: dict[Key, Sequence[SweepPoint]]) -> None:
    """Plot every sweep: a single one to `path`, several to the files of `plot_path`."""
    for (place, operation), points in found.items():
        target = path if len(found) == 1 else plot_path(path, place, operation, list({key[0]: None for key in found}))
        _plot(target, f"{operation} on {place}", points)
        print(f"drawn: {target}", file=sys.stderr)


def plot_path(path: Path, place: Path, operation: str, places: Sequence[Path]) -> Path:
    """Return the file for one of several plots: `out.png` becomes `out-read-nvme0.png`. Equal names are numbered."""
    name = re.sub(r"[^A-Za-z0-9._]+", "-", place.resolve().name) or "root"
    alike = [other for other in places if other.resolve().name == place.resolve().name]
    number = f"-{alike.index(place) + 1}" if len(alike) > 1 else ""
    return path.with_name(f"{path.stem}-{operation}-{name}{number}{path.suffix}")


def _plot(path: Path, title: str, points: Sequence[SweepPoint]) -> None:
    figure = new_figure("--plot", 7, 4.5)
    axes = figure.subplots()
    for depth in sorted({point.options.queue_depth for point in points}):
        line = sorted(
            (point.options.block_size_bytes, point.bytes_per_s / 1e9)
            for point in points
            if point.options.queue_depth == depth
        )
        axes.plot([block for block, _ in line], [rate for _, rate in line], marker="o", label=f"depth {depth}")
    blocks = sorted({point.options.block_size_bytes for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(blocks, [block_text(block) for block in blocks])
    axes.set(title=title, xlabel="block size", ylabel="GB/s", ylim=(0, None))
    axes.legend()
    save_figure(figure, "--plot", path)


def write_config(path: Path, found: dict[Key, Sequence[SweepPoint]], default: IoOptions) -> None:
    """Write the `aio` settings that are best for all sweeps into a configuration, or into a new one."""
    try:
        options = best_for_all(list(found.values()), default).options
        values = {"aio.block_size": options.block_size_bytes, "aio.queue_depth": options.queue_depth}
        write_json(path, with_values(path if path.exists() else {}, values), "it")
    except (OSError, ConfigError) as error:
        raise ConfigError(f"--write-config {path}: {error}") from error


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
