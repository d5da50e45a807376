"""Writes events of a training to TensorBoard, Weights & Biases or CSV files, as the configuration says.

An event is (name, value, samples so far).
"""

from __future__ import annotations

import csv
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from infinity.config import MonitorConfig
from infinity.errors import ConfigError
from infinity.telemetry.counters import StepStats

_log = logging.getLogger(__name__)

Event = tuple[str, float, int]


def tier_costs(stats: StepStats) -> dict[str, float]:
    """Return the transfers of a step (`tiers/nvme_read_gb`) and its waits (`tiers/disk_read_wait_s`), by name."""
    moved = {f"tiers/{route}_gb": nbytes / 1e9 for route, nbytes in stats.tier_bytes.items()}
    return moved | {f"tiers/{cause}_wait_s": seconds for cause, seconds in stats.stall_s.items()}


def tier_peaks(stats: StepStats) -> dict[str, float]:
    """Return the peak of each memory (`tiers/peak_host_gb`), by name."""
    return {f"tiers/peak_{tier}_gb": nbytes / 1e9 for tier, nbytes in stats.peak_bytes.items()}


def check_packages(config: MonitorConfig) -> None:
    """Check that the packages of the enabled writers are installed.

    Raises:
        ConfigError: a package is missing. The message contains the command that installs it.
    """
    for package, section in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if section is not None and find_spec(package) is None:
            raise ConfigError(
                f"{package}.enabled is true but the package is not installed: python -m pip install {package}, or set "
                "it to false"
            )


class Monitor:
    """The event writers of this process. Most processes have none.

    A writer that fails is removed with a warning, and training continues.

    Args:
        config: which writers are enabled.
        writes: whether this process is the one that writes.
    """

    def __init__(self, config: MonitorConfig, *, writes: bool) -> None:
        self._config = config
        self._writes = writes
        self._writers: list[_Writer] = []

    @property
    def enabled(self) -> bool:
        """Whether any process writes events: this one, or rank 0 for all."""
        return self._config.enabled

    @property
    def writes(self) -> bool:
        """Whether this process writes events."""
        return bool(self._writers)

    def open(self) -> None:
        """Open the writers, if this process writes.

        Raises:
            ConfigError: a writer cannot be opened.
        """
        config = self._config
        if not self._writes:
            return
        with ExitStack() as undo:
            undo.callback(self.close)
            if config.tensorboard is not None:
                self._writers.append(_made(_TensorBoard, "tensorboard", config.tensorboard))
            if config.wandb is not None:
                self._writers.append(_made(_Wandb, "wandb", config.wandb))
            if config.csv is not None:
                self._writers.append(_made(_Csv, "csv_monitor", config.csv))
            undo.pop_all()

    def follow(self) -> Monitor:
        """Return a new monitor that takes over the open writers; this one writes nothing more."""
        other = Monitor(self._config, writes=self._writes)
        self._writers, other._writers = [], self._writers
        return other

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write events with all writers. Does nothing on ranks that have none.

        Args:
            event_list: (name, number, samples so far); the number may be a tensor of one element.
        """
        if not self._writers:
            return
        events = [(name, float(value), int(samples)) for name, value, samples in event_list]
        for writer in list(self._writers):
            try:
                writer.write(events)
            except Exception as error:  # a library, network or disk error must not end the training
                _log.warning("%s failed; later events are not written to it: %s", writer, error)
                self._writers.remove(writer)

    def close(self) -> None:
        """Flush and close all writers."""
        while self._writers:
            writer = self._writers.pop()
            try:
                writer.close()
            except Exception as error:
                _log.warning("closing %s failed: %s", writer, error)


_ADVICE = {"wandb": " (with WANDB_MODE=offline in the environment, it needs no account and no network)"}


class _Writer(ABC):
    """Writes events to one destination."""

    @abstractmethod
    def write(self, events: Sequence[Event]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def _made(kind: Any, section: str, config: Any) -> _Writer:
    try:
        writer: _Writer = kind(config)
    except Exception as error:
        problem = f"{section}.enabled is true, but {section} cannot be opened: {error}"
        raise ConfigError(f"{problem}{_ADVICE.get(section, '')}") from error
    return writer


class _TensorBoard(_Writer):
    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (needs a package that is optional)

        self._directory = directory
        self._writer: Any = SummaryWriter(log_dir=str(directory))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __str__(self) -> str:
        return f"tensorboard in {self._directory}"


class _Wandb(_Writer):
    """Logs to the run that the script has begun and will finish, or else to a run that this class begins."""

    def __init__(self, config: Any) -> None:
        import wandb  # type: ignore[import-not-found]  # noqa: PLC0415  (optional, and slow)

        self._begun = wandb.run is None
        self._run: Any = wandb.run
        if self._begun:
            self._run = wandb.init(project=config.project, group=config.group, entity=config.team)

    def write(self, events: Sequence[Event]) -> None:
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            by_samples.setdefault(samples, {})[name] = value
        for samples, values in sorted(by_samples.items()):  # wandb ignores a step that is lower than the last one
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._begun:
            self._run.finish()

    def __str__(self) -> str:
        return "wandb"


class _Csv(_Writer):
    """Appends to one file per name, such as `Train_Samples_lr.csv`, also if an earlier run of the job wrote it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._files: dict[str, IO[str]] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            if name not in self._files:
                self._files[name] = self._open(name)
            csv.writer(self._files[name], lineterminator="\n").writerow([samples, value])
        for file in self._files.values():
            file.flush()

    def _open(self, name: str) -> IO[str]:
        path = self._directory / f"{name.replace('/', '_').replace(' ', '_')}.csv"
        file = path.open("a", newline="")
        if not file.tell():
            csv.writer(file, lineterminator="\n").writerow(["step", name.rpartition("/")[2]])
        return file

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __str__(self) -> str:
        return f"csv_monitor in {self._directory}"
