"""Drawings of plans."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infinity.distribution import install_command
from infinity.errors import ConfigError, InfinityError

if TYPE_CHECKING:
    from infinity.planner import Point

_AXES = {"tokens": "tokens of a micro-batch", "host-memory": "tiering.host_memory, GiB", "drives": "drives"}


def plot_sweep(path: Path, what: str, points: Sequence[Point]) -> None:
    """Step and tokens a second over what is swept.

    Raises:
        InfinityError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InfinityError(f"--plot needs matplotlib: {install_command('plot')}") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    values = [point.value / (1 << 30 if what == "host-memory" else 1) for point in points]
    axes.plot(values, [point.step_s for point in points], marker="o", label="step, s")
    axes.set(xlabel=_AXES[what], ylabel="step, s", ylim=(0, None), xscale="linear" if what == "drives" else "log")
    other = axes.twinx()
    other.plot(values, [point.tokens_per_s for point in points], marker="s", color="tab:orange", label="tokens/s")
    other.set(ylabel="tokens/s", ylim=(0, None))
    figure.legend(loc="outside upper center", ncols=2)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}; give a file to write, such as sweep.png") from error
