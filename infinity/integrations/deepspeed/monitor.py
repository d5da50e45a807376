"""`deepspeed.monitor`: a monitor for the script's own use, besides the engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.config import MonitorConfig, load_config
from infinity.telemetry import Monitor
from infinity.telemetry.monitor import check_packages
from infinity.zero.ranks import is_first_process

_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet", "trackio")


class MonitorMaster(Monitor):
    """Writes on rank 0 until it is closed, or the process exits.

    Raises:
        ConfigError: a package is not installed, or a monitor cannot be opened.
    """

    def __init__(self, monitor_config: MonitorConfig) -> None:
        super().__init__(monitor_config, writes=is_first_process())
        if is_first_process():
            check_packages(monitor_config)
        self.open()


def get_monitor_config(param_dict: Mapping[str, Any]) -> MonitorConfig:
    """Return the monitors of a configuration. Its other sections are not checked."""
    return load_config({key: param_dict[key] for key in _SECTIONS if key in param_dict}).monitors
