"""Figures drawn with matplotlib, which is an optional package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinity.distribution import install_command
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.planner import Point

_AXES = {"tokens": "tokens of a micro-batch", "host-memory": "tiering.host_memory, GiB", "drives": "drives"}


def check_matplotlib(option: str) -> None:
    """Raise ConfigError if matplotlib is missing. Called before the measurement, which may take an hour."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} needs matplotlib: {install_command('plot')}") from error


def new_figure(option: str, width: float, height: float) -> Any:
    """Return an empty figure for the file that an option names."""
    check_matplotlib(option)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, option: str, path: Path) -> None:
    """Write a figure to the file that an option names."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {error}; give a file to write, such as plot.png") from error


def plot_sweep(path: Path, what: str, points: Sequence[Point]) -> None:
    """Plot step time and tokens per second against the swept quantity."""
    figure = new_figure("--plot", 7, 4.5)
    axes = figure.subplots()
    values = [point.value / (1 << 30 if what == "host-memory" else 1) for point in points]
    axes.plot(values, [point.step_s for point in points], marker="o", label="step, s")
    axes.set(xlabel=_AXES[what], ylabel="step, s", ylim=(0, None), xscale="linear" if what == "drives" else "log")
    other = axes.twinx()
    other.plot(values, [point.tokens_per_s for point in points], marker="s", color="tab:orange", label="tokens/s")
    other.set(ylabel="tokens/s", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    save_figure(figure, "--plot", path)
