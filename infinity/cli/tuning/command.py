"""Carries out `infinity tune`, from its options to the files that it writes."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import transformers

from infinity import __version__
from infinity.cli.arguments import check_file, check_least
from infinity.cli.pages.document import write_page
from infinity.cli.planning import libraries_bytes
from infinity.cli.progress import Progress
from infinity.cli.training.models import build_model, max_tokens
from infinity.cli.tuning.launcher import TrialJob, Trials, Workers, measure_in_process
from infinity.cli.tuning.page import page
from infinity.cli.tuning.report import report_of
from infinity.config import Config, load_config, read_json, write_json
from infinity.errors import ConfigError
from infinity.memory import available_memory_bytes
from infinity.profiling import read_profile
from infinity.tuning import (
    Bounds,
    Choices,
    Limits,
    MachineJob,
    Outlook,
    Record,
    Search,
    best_ways,
    choices_of,
    read_record,
    setting_of,
)
from infinity.zero.launch import launch_of
from infinity.zero.sizing import compute_dtype

_ASKED = (  # options that must not change when a search continues
    "model",
    "seq_len",
    "checkpoint_activations",
    "device",
    "steps",
    "host_memory",
    "device_memory",
    "max_disk",
    "keep",
    "allow_lossy",
)
_EXIT_INTERRUPTED = 130
_WAYS = 2  # the fastest aio settings, which training is measured with in addition to the given one
_MOST_SHARE = 0.08  # share of the budget for the measured steps of one run


def tune(args: argparse.Namespace) -> int:
    """Search, write and report. Return the exit code.

    Raises:
        ConfigError: an option or the configuration is invalid. Raised before anything is measured.
    """
    values, config = _read(args)
    if launch_of(os.environ) is not None:
        raise ConfigError("`infinity tune` measures one process: start it alone, not as one of several ranks")
    record = _record(args, values)
    code = 0
    with _Shown(args.budget) as progress, Workers() as workers:
        outlook, choices = _look(args, values, config, record, workers, progress)
        trials = Trials(workers, outlook, _trial_job(args, progress))
        search = Search(outlook, choices, record, trials.measure, args.budget, tell=progress.tell)
        try:
            outcome = search.run()
        except (KeyboardInterrupt, SystemExit) as end:  # Ctrl-C, and signals by `unwind_on_signals`
            code = int(end.code or 0) if isinstance(end, SystemExit) else _EXIT_INTERRUPTED
            outcome = search.outcome("interrupted; --resume continues")
    report = report_of(args.model, args.seq_len, outcome, outlook, choices, record)
    write_json(args.out, report.values, "the configuration")
    if args.html is not None:
        write_page(args.html, page(report))
    print(json.dumps(report.facts()) if args.json else "\n".join(report.lines()))
    if not args.json:
        print(f"written to {args.out}")
    return code


# Preparation #


def _read(args: argparse.Namespace) -> tuple[dict[str, Any], Config]:
    """Check the options. Return the content of the given file, and its configuration."""
    check_least(args, 1, "seq_len", "steps")
    for name in ("out", "html"):
        path = getattr(args, name)
        if path is not None:
            check_file(f"--{name}", path)
    if args.out.exists() and args.config.exists() and args.out.samefile(args.config):
        raise ConfigError(f"--out {args.out} is the given configuration, which is not overwritten: name another file")
    values = read_json(args.config)
    values.pop("tuned", None)  # notes of an earlier search
    return values, load_config(values)


def _record(args: argparse.Namespace, values: dict[str, Any]) -> Record:
    """Return the record of a new search, or of the one to continue."""
    path = args.out.with_name(f"{args.out.stem}.search.json")
    asked = {
        "config": values,
        "infinity": __version__,
        "cores": len(os.sched_getaffinity(0)),
        **{name: getattr(args, name) for name in _ASKED},
    }
    if args.resume:
        return read_record(path, asked)
    if path.exists():
        raise ConfigError(f"{path} holds an earlier search: give --resume to continue it, or remove the file")
    return Record(asked, path)


def _look(
    args: argparse.Namespace,
    values: dict[str, Any],
    config: Config,
    record: Record,
    workers: Workers,
    progress: _Shown,
) -> tuple[Outlook, Choices]:
    """Measure the machine, unless the record has it. Return the predictions, and the values of the knobs."""
    transformers.logging.set_verbosity_error()  # its remarks on configurations are for model authors
    model = build_model(args.model)[0]
    max_tokens(model, args.model, args.seq_len)
    limits = Limits(args.host_memory, args.device_memory, args.max_disk)
    setting_of(config, limits)  # raises before anything is measured, if a limit is exceeded
    if record.machine is None:
        began_s = time.monotonic()
        profile = None if args.profile is None else read_profile(args.profile)
        record.machine = measure_in_process(workers, _machine_job(args, config), profile, progress.doing)
        record.spent_s += time.monotonic() - began_s
        record.write()
    bounds = Bounds(limits, available_memory_bytes(), libraries_bytes())
    outlook = Outlook(model, values, record.machine, bounds, args.seq_len, checkpointing=args.checkpoint_activations)
    choices = choices_of(
        config,
        limits,
        aio=best_ways(record.machine, _WAYS),
        discrete=record.machine["device_bytes"] is not None,
        keep=args.keep,
        lossy=args.allow_lossy,
    )
    return outlook, choices


def _machine_job(args: argparse.Namespace, config: Config) -> MachineJob:
    aio = config.aio
    return MachineJob(
        paths=tuple(str(nvme.path.absolute()) for nvme in config.tiering.nvme),
        aio=(aio.block_size_bytes, aio.queue_depth, config.tiering.io_backend),
        threads=aio.threads,
        sqpoll=aio.sqpoll,
        iopoll=aio.iopoll,
        dtype=str(compute_dtype(config)).removeprefix("torch."),
        on_cpu=args.device == "cpu",
    )


def _trial_job(args: argparse.Namespace, progress: _Shown) -> TrialJob:
    return TrialJob(
        args.model,
        args.seq_len,
        args.checkpoint_activations,
        args.device,
        args.steps,
        most_s=_MOST_SHARE * args.budget,
        tick=progress.tick,
    )


class _Shown(Progress):
    """Shows the search as a progress bar."""

    def __init__(self, budget_s: float) -> None:
        super().__init__()
        self._budget_s = budget_s
        self._run, self._spent, self._told_s = "", 0.0, 0.0  # the present run, the share spent before, its start

    def doing(self, what: str) -> None:
        """Show what is measured of the machine."""
        self.show(f"this machine: {what}", 0.0)

    def tell(self, text: str, share: float) -> None:
        """Show that a run begins."""
        self._run, self._spent, self._told_s = text, share, time.monotonic()
        self.show(text, share)

    def tick(self, step_s: list[float]) -> None:
        """Show the progress of the run."""
        seen = f": {min(step_s):.2f} s a step" if step_s else ""
        share = self._spent + (time.monotonic() - self._told_s) / self._budget_s
        self.show(self._run + seen, share)
