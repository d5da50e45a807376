"""The checked options of `infinity bench-io`, and the bytes that it will write."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from infinity.cli.arguments import check_least, drive_paths
from infinity.config import AioConfig, format_size, load_config
from infinity.errors import ConfigError
from infinity.io import IoOptions
from infinity.io.fio import fio_version
from infinity.io.patterns import check_operation, written_share

_DEFAULT_OPERATIONS = ("read", "write", "mixed")
_FIO_RUNTIME_S = 3.0  # of a run that is compared with fio; the ratio of shorter runs mostly shows the drive's variance
_SWEPT_S = 0.5  # of one measurement of a sweep
_MOST_SWEPT_BYTES = 64 << 30  # the default limit of what a sweep writes, because writes wear a drive


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        huge_pages: use huge pages if the kernel has them; in a comparison with fio, only if fio's memory has them, too.
        pages_by_name: whether --pages was given.
        most_written_bytes: limit of the bytes written; None for no limit.
        runtime_s: seconds of a run, in whole passes over the file; 0 for one pass. With --sweep, of a measurement.
        fio: measure fio in turn; `fio_engine` is its engine, None for the counterpart of ours.
    """

    paths: tuple[Path, ...]
    operations: tuple[str, ...]
    size_bytes: int
    options: IoOptions
    backend: str
    huge_pages: bool
    pages_by_name: bool
    runs: int
    runtime_s: float
    verify: bool
    fio: bool
    fio_engine: str | None
    most_written_bytes: int | None
    json: bool

    def fill_bytes(self) -> int:
        """Return the bytes that are written before the measurements: each file once."""
        return self.size_bytes * len(self.paths)

    def least_written_bytes(self) -> int:
        """Return the bytes written in total if each run takes one pass over its file; `--runtime` may need more."""
        return self.fill_bytes() + sum(map(self._written_per_pass, self.operations)) + self._verified_bytes()

    def written_bytes_at(self, bytes_per_s: float) -> int:
        """Return about how many bytes are written with `--runtime`, on a drive of this rate."""
        if not self.runtime_s:
            return self.least_written_bytes()
        passes = max(1.0, self.runtime_s * bytes_per_s / self.size_bytes)
        measured = sum(map(self._written_per_pass, self.operations))
        about = int(self.fill_bytes() + passes * measured + self._verified_bytes())
        return about if self.most_written_bytes is None else min(about, self.most_written_bytes)

    def most_passes(self, operation: str) -> int | None:
        """Return the most passes of one run within the limit of bytes written; None for no limit.

        Raises:
            ConfigError: one pass for each run would exceed the limit.
        """
        if self.most_written_bytes is None or not written_share(operation):
            return None
        if self.least_written_bytes() > self.most_written_bytes:
            raise ConfigError(
                f"--max-write {format_size(self.most_written_bytes)}: this writes at least "
                f"{format_size(self.least_written_bytes())}; raise it, or lower --size or --runs"
            )
        left = self.most_written_bytes - self.fill_bytes() - self._verified_bytes()
        return int(left // sum(map(self._written_per_pass, self.operations)))

    def _written_per_pass(self, operation: str) -> int:
        """By all runs, if each goes over its file once; several paths are measured together as well."""
        times = self.runs * (2 if self.fio else 1) + (self.runs if len(self.paths) > 1 else 0)
        times += 1 if self.runtime_s else 0  # the warm-up
        return int(self.size_bytes * written_share(operation)) * len(self.paths) * times

    def _verified_bytes(self) -> int:
        written = sum(int(self.size_bytes * written_share(operation)) for operation in self.operations)
        return written * len(self.paths) if self.verify else 0


def job_of(args: argparse.Namespace) -> Job:
    """Return the checked options. Options that are not given have the values of training.

    Raises:
        ConfigError: an option or a combination that cannot work.
    """
    check_least(args, 1, "queue_depth", "threads", "runs")
    if args.runtime is not None and not 0 <= args.runtime < math.inf:
        raise ConfigError(f"--runtime is {args.runtime}; it must be a number of seconds that is not negative")
    if args.sweep and args.runtime == 0:
        raise ConfigError("--runtime is 0; with --sweep it must be more: the seconds of one measurement")
    if not args.sweep and (args.plot or args.write_config or args.resume):
        raise ConfigError("--plot, --write-config and --resume need --sweep: add --sweep")
    if args.sweep and (args.compare_fio or args.verify):
        raise ConfigError("--sweep cannot be combined with --compare-fio or --verify")
    operations = tuple(dict.fromkeys(args.op or (("mixed",) if args.sweep else _DEFAULT_OPERATIONS)))
    for operation in operations:
        check_operation(operation)
    if args.verify and not any(written_share(operation) for operation in operations):
        raise ConfigError(f"--verify reads back what was written, and {', '.join(operations)} writes nothing")
    if args.compare_fio:
        fio_version()  # raises if fio is missing, before a file is written
    config = load_config(args.config or {})
    return Job(
        paths=drive_paths(args.path, config),
        operations=operations,
        size_bytes=args.size,
        options=_options(args, config.aio),
        backend=args.backend or config.tiering.io_backend,
        huge_pages=args.pages != "small",
        pages_by_name=args.pages is not None,
        runs=args.runs,
        runtime_s=_runtime_s(args),
        verify=args.verify,
        fio=args.compare_fio,
        fio_engine=args.fio_engine,
        most_written_bytes=_MOST_SWEPT_BYTES if args.sweep and args.max_write is None else args.max_write,
        json=args.json,
    )


def _runtime_s(args: argparse.Namespace) -> float:
    if args.runtime is not None:
        return float(args.runtime)
    return _SWEPT_S if args.sweep else _FIO_RUNTIME_S if args.compare_fio else 0.0


def _options(args: argparse.Namespace, training: AioConfig) -> IoOptions:
    given: dict[str, int | None] = {
        "block_size_bytes": args.block_size,
        "queue_depth": args.queue_depth,
        "threads": args.threads,
    }
    return replace(
        IoOptions.of(training),
        sqpoll=args.sqpoll or training.sqpoll,
        iopoll=args.iopoll or training.iopoll,
        direct=not args.buffered,
        **{name: value for name, value in given.items() if value is not None},
    )
