"""`infinity tune`: the fastest configuration for a model on this machine."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity import __version__
from infinity.cli.arguments import duration_argument, size_argument
from infinity.cli.packages import needed_packages
from infinity.config import Config, load_config, read_json
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.cli.progress import Progress
    from infinity.cli.tuning.launcher import TrialJob, Workers
    from infinity.cli.tuning.report import Report
    from infinity.tuning import Choices, Limits, Outlook, Record

_KNOBS = ("placement", "state_format", "schedule", "tile", "aio", "batch", "memory")
_EXIT_INTERRUPTED = 130
_MOST_SHARE = 0.08  # of the budget, for the measured steps of one run


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest configuration for a model on this machine",
        description="Measures short runs of the model, each in a process of its own, the given configuration first. "
        "What a training computes stays: batch, optimizer, precision, exact state formats. Ctrl-C ends with the best "
        "so far; --resume goes on.",
    )
    parser.add_argument("config", type=Path, help="configuration to begin with (JSON)")
    parser.add_argument("--model", required=True, help="as `infinity train --model` takes it")
    parser.add_argument("--out", type=Path, required=True, help="where the tuned configuration goes")
    parser.add_argument("--budget", type=duration_argument, default=300.0, help="time of the search (default 5m)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens in a sample")
    parser.add_argument(
        "--checkpoint-activations", action="store_true", help="keep the inputs of blocks only, as `infinity train` does"
    )
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument(
        "--steps", type=int, default=4, help="measured steps of a run, after two to warm up (fewer where they are long)"
    )
    limits = parser.add_argument_group("limits (default: the configuration's, and what is free)")
    limits.add_argument("--host-memory", type=size_argument, help="most that tiering.host_memory may be")
    limits.add_argument("--device-memory", type=size_argument, help="most that tiering.device_memory may be")
    limits.add_argument("--max-disk", type=size_argument, help="most that swap files may take")
    limits.add_argument("--keep", choices=_KNOBS, action="append", default=[], help="leave this as it is; repeatable")
    limits.add_argument("--allow-lossy", action="store_true", help="try state formats that round moments, too")
    parser.add_argument("--profile", type=Path, help="what `infinity profile --output` wrote, in place of measuring")
    parser.add_argument("--resume", action="store_true", help="go on with the search of this --out")
    parser.add_argument("--html", type=Path, help="write a report with plots, one page, to this file")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, write and report; returns the exit code."""
    values, config = _read(args)
    with needed_packages("tune"):
        from infinity.cli.tuning import report as reports  # noqa: PLC0415  (torch takes seconds)
        from infinity.cli.tuning.launcher import Trials, Workers  # noqa: PLC0415
        from infinity.tuning import Search  # noqa: PLC0415
        from infinity.zero.launch import launch_of  # noqa: PLC0415
    if launch_of(os.environ) is not None:
        raise ConfigError("`infinity tune` measures one process: start it alone, not as one of several ranks")
    record = _record(args, values)
    progress = _Shown(args.budget)
    interrupted = False
    try:
        with Workers() as workers:
            outlook, choices = _look(args, values, config, record, workers, progress)
            trials = Trials(workers, outlook, _trial_job(args, progress))
            search = Search(outlook, choices, record, trials.measure, args.budget, tell=progress.tell)
            try:
                outcome = search.run()
            except KeyboardInterrupt:
                interrupted = True
                outcome = search.outcome("interrupted; --resume goes on")
    finally:
        progress.clear()
    report = reports.report_of(args.model, args.seq_len, outcome, outlook, choices, record)
    _write(args, report)
    print(json.dumps(report.facts()) if args.json else "\n".join(report.lines()))
    if not args.json:
        print(f"written to {args.out}")
    return _EXIT_INTERRUPTED if interrupted else 0


# Before #


def _read(args: argparse.Namespace) -> tuple[dict[str, Any], Config]:
    """The file as it is, and what it means.

    Raises:
        ConfigError: it cannot work, or an option cannot.
    """
    for name in ("seq_len", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    for name in ("out", "html"):
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: there is no such directory")
    if args.out.exists() and args.config.exists() and args.out.samefile(args.config):
        raise ConfigError(f"--out {args.out} is the given configuration, which stays as it is: name another file")
    values = read_json(args.config)
    values.pop("tuned", None)  # the notes of a search before
    return values, load_config(values)


def _limits(args: argparse.Namespace) -> Limits:
    from infinity.tuning import Limits  # noqa: PLC0415

    return Limits(args.host_memory, args.device_memory, args.max_disk)


def _record(args: argparse.Namespace, values: dict[str, Any]) -> Record:
    """A new search, or the one that is to go on."""
    from infinity.tuning import Record, read_record  # noqa: PLC0415

    path = args.out.with_name(f"{args.out.stem}.search.json")
    asked = {
        "config": values,
        "infinity": __version__,
        "cores": len(os.sched_getaffinity(0)),
        **{
            name: getattr(args, name)
            for name in ("model", "seq_len", "checkpoint_activations", "device", "steps", "keep", "allow_lossy")
        },
        **{name: getattr(args, name) for name in ("host_memory", "device_memory", "max_disk")},
    }
    if args.resume:
        return read_record(path, asked)
    if path.exists():
        raise ConfigError(f"{path} holds a search that was begun before: give --resume to go on with it, or remove it")
    return Record(asked, path)


def _look(
    args: argparse.Namespace,
    values: dict[str, Any],
    config: Config,
    record: Record,
    workers: Workers,
    progress: _Shown,
) -> tuple[Outlook, Choices]:
    """Measure the machine, unless the record has it, and lay out what there is to choose from."""
    import transformers  # noqa: PLC0415  (torch takes seconds)

    from infinity.cli.planning import libraries_bytes  # noqa: PLC0415
    from infinity.cli.training.models import build_model, max_tokens  # noqa: PLC0415
    from infinity.cli.tuning.launcher import measure_in_process  # noqa: PLC0415
    from infinity.memory import available_memory_bytes  # noqa: PLC0415
    from infinity.profiling import read_profile  # noqa: PLC0415
    from infinity.tuning import Bounds, Outlook, best_ways, choices_of, setting_of  # noqa: PLC0415
    from infinity.zero.sizing import compute_dtype  # noqa: PLC0415

    transformers.logging.set_verbosity_error()  # its remarks on configurations are for model authors
    model = build_model(args.model)[0]
    longest = max_tokens(model)
    if longest is not None and args.seq_len > longest:
        raise ConfigError(f"--seq-len is {args.seq_len}, but {args.model} takes at most {longest} tokens")
    limits = _limits(args)
    given = setting_of(config, limits)  # refused before anything is measured
    if record.machine is None:
        began_s = time.monotonic()
        job = {
            "paths": [str(nvme.path) for nvme in config.tiering.nvme],
            "aio": given.aio,
            "threads": config.aio.threads,
            "sqpoll": config.aio.sqpoll,
            "iopoll": config.aio.iopoll,
            "dtype": str(compute_dtype(config)).removeprefix("torch."),
            "on_cpu": args.device == "cpu",
        }
        profile = None if args.profile is None else read_profile(args.profile)
        record.machine = measure_in_process(workers, job, profile, progress.doing)
        record.spent_s += time.monotonic() - began_s
        record.write()
    bounds = Bounds(limits, available_memory_bytes(), libraries_bytes())
    outlook = Outlook(model, values, record.machine, bounds, args.seq_len, checkpointing=args.checkpoint_activations)
    choices = choices_of(
        config,
        limits,
        aio=best_ways(record.machine, 2),
        discrete=record.machine["device_bytes"] is not None,
        keep=args.keep,
        lossy=args.allow_lossy,
    )
    return outlook, choices


def _trial_job(args: argparse.Namespace, progress: _Shown) -> TrialJob:
    from infinity.cli.tuning.launcher import TrialJob  # noqa: PLC0415

    return TrialJob(
        args.model,
        args.seq_len,
        args.checkpoint_activations,
        args.device,
        args.steps,
        most_s=_MOST_SHARE * args.budget,
        tick=progress.tick,
    )


class _Shown:
    """The search on a progress bar."""

    def __init__(self, budget_s: float) -> None:
        from infinity.cli.progress import Progress  # noqa: PLC0415

        self._progress: Progress = Progress()
        self._budget_s = budget_s
        self._text = "this machine"
        self._share = 0.0
        self._told_s = time.monotonic()

    def doing(self, what: str) -> None:
        """While the machine is measured."""
        self._progress.show(f"this machine: {what}", 0.0)

    def tell(self, text: str, share: float) -> None:
        """A run begins."""
        self._text, self._share, self._told_s = text, share, time.monotonic()
        self._progress.show(text, share)

    def tick(self, step_s: list[float]) -> None:
        """A run goes on."""
        seen = f": {min(step_s):.2f} s a step" if step_s else ""
        share = self._share + (time.monotonic() - self._told_s) / self._budget_s
        self._progress.show(self._text + seen, share)

    def clear(self) -> None:
        self._progress.clear()


# After #


def _write(args: argparse.Namespace, report: Report) -> None:
    from infinity.cli.tuning.page import page  # noqa: PLC0415
    from infinity.tuning import write_json  # noqa: PLC0415

    write_json(args.out, report.values, "the configuration")
    if args.html is not None:
        try:
            args.html.write_text(page(report), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--html {args.html}: {error.strerror}") from error
